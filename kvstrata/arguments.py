"""Checks of what callers pass: ValueError with the name, the value and what it may be, before the core sees it."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "MediaItem",
    "check_flag",
    "check_number",
    "check_request",
    "check_seconds",
    "check_tokens",
    "check_whole",
    "media_arrays",
    "media_items",
    "token_array",
]


INT32 = np.dtype(np.int32)
MOST_TOKENS = (1 << 31) - 1  # that the core can count


class MediaItem(NamedTuple):
    """`length` tokens from `offset` (of the request) on stand for the content with this 32-byte digest (SHA-256 of it, say)."""

    offset: int
    length: int
    digest: bytes


def token_array(tokens: Any) -> npt.NDArray[np.int32]:
    """Token ids as a contiguous int32 array, copied only where needed. Takes sequences, numpy and torch arrays of integers.

    Raises ValueError for other types, more than one dimension, or ids outside int32.
    """
    if type(tokens) is np.ndarray and tokens.dtype is INT32 and tokens.ndim == 1 and tokens.flags.c_contiguous:
        return tokens
    if hasattr(tokens, "detach"):
        tokens = tokens.detach().cpu().numpy()
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be a flat sequence of integers, not {array.dtype} of shape {array.shape}")
    if array.dtype != np.int32 and (array.max() > 0x7FFFFFFF or array.min() < -0x80000000):
        raise ValueError(f"token id {array.max()} does not fit in int32")
    return np.ascontiguousarray(array, np.int32)


def check_request(reserve: Any, leave: Any, multiple: Any, read: Any, write: Any, load: Any, must: Any) -> None:
    """The numbers of tokens and the flags of a request. Raises ValueError for the first that cannot be."""
    # The usual kinds at one glance: every request is asked, and by name each check costs as much as this.
    whole = type(reserve) is type(leave) is type(multiple) is int and min(reserve, leave, multiple) >= 0
    flags = type(read) is type(write) is type(load) is type(must) is bool
    if whole and flags and max(reserve, leave, multiple) <= MOST_TOKENS:
        return
    for name, value in (("reserve", reserve), ("leave", leave), ("multiple", multiple)):
        check_tokens(name, value)
    for name, flag in (("read", read), ("write", write), ("load", load), ("must", must)):
        check_flag(name, flag)


def check_whole(name: str, value: Any, low: int, high: int, of: str = "") -> None:
    """Raises ValueError unless `value` is an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, but must be a whole number{of and f' of {of}'} from {low} to {high}")


def check_tokens(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a whole number of tokens that the core can count."""
    check_whole(name, value, 0, MOST_TOKENS, "tokens")


def check_number(name: str, value: Any, allowed: str, good: Callable[[Any], bool]) -> None:
    """Raises ValueError unless `value` is a finite number for which `good` holds; `allowed` says in words for which it does."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not good(value):
        raise ValueError(f"{name} must be {allowed}, not {value!r}")


def check_seconds(name: str, value: Any, low: float = -math.inf) -> None:
    """Raises ValueError unless `value` is a number of seconds, at least `low`; infinity is one, NaN is not."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or math.isnan(value) or value < low:
        least = "" if low == -math.inf else f", at least {low:g}"
        raise ValueError(f"{name} is {value!r}, but must be a number of seconds{least}")


def check_flag(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} is {value!r}, but must be True or False")


_NO_MEDIA = (np.empty(0, np.int64), np.empty(0, np.int64), b"")


def media_items(media: Iterable[MediaItem] | None) -> tuple[MediaItem, ...]:
    """Its items, which an iterator gives only once. Raises ValueError for what has none."""
    try:
        return tuple(media or ())
    except TypeError:
        raise ValueError(f"media is {media!r}, but must be a list of MediaItem") from None


def media_arrays(media: Iterable[MediaItem]) -> tuple[np.ndarray, np.ndarray, bytes]:
    """Offsets and lengths, int64 `[items]`, and all digests in a row. Raises ValueError for items that cannot be."""
    media = media_items(media)
    if not media:
        return _NO_MEDIA
    end = 0
    for item in media:
        if not isinstance(item, MediaItem) or not isinstance(item.digest, bytes):
            raise ValueError(f"media item {item!r} must be a MediaItem(offset, length, digest) with a digest of 32 bytes")
        check_tokens("the offset of a media item", item.offset)
        check_tokens("the length of a media item", item.length)
        if len(item.digest) != 32:
            raise ValueError(f"the digest of the media item at token {item.offset} has {len(item.digest)} bytes; it must have 32")
        if item.offset < end or item.length < 1:
            raise ValueError(
                f"media item at token {item.offset} with length {item.length}: items must be in order, apart, and not empty"
            )
        end = item.offset + item.length
    offsets = np.array([item.offset for item in media], np.int64)
    lengths = np.array([item.length for item in media], np.int64)
    return offsets, lengths, b"".join(bytes(item.digest) for item in media)
