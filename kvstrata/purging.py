"""Dropping pages from a cache that is in use: from memory, from its own shelves, and from those that nobody owns."""

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstrata._core import Core, continuations
from kvstrata._core import purge as purge_directory
from kvstrata.arguments import check_flag, check_seconds, token_array
from kvstrata.explaining import page_keys

__all__ = ["merged", "order_of", "purge"]


def order_of(
    base: bytes, page_size: int, namespace: bytes | None, tokens: Any, unused_for: float | None, everything: bool
) -> dict[str, Any]:
    """What the core is told, from the arguments of PrefixCache.purge. `base`: the namespace where none is named. Raises
    ValueError."""
    check_flag("everything", everything)
    if (namespace is not None or tokens is not None) + (unused_for is not None) + everything != 1:
        raise ValueError("say what to drop: a namespace or tokens, or unused_for, or everything=True")
    if everything:
        return {"all": True}
    if unused_for is not None:
        check_seconds("unused_for", unused_for, 0)
        return {"before": max(time.time() - unused_for, 0.0)}
    space = base if namespace is None else namespace
    if not isinstance(space, bytes) or len(space) != 32:
        raise ValueError(f"namespace is {space!r}, but must be 32 bytes, as namespace() gives them")
    return {"spaces": [space]} if tokens is None else {"prefixes": [_last_page(space, token_array(tokens), page_size)]}


def _last_page(space: bytes, tokens: npt.NDArray[np.int32], page_size: int) -> bytes:
    if len(tokens) < page_size:
        raise ValueError(f"tokens holds {len(tokens)} token ids, but must hold at least a page of {page_size}")
    return page_keys(space, tokens, page_size)[-1]


def purge(core: Core, root: str, order: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Carries one order out; see PrefixCache.purge for what is returned."""
    started = time.monotonic()
    own = order
    if root and "prefixes" in order:  # before any is dropped: with it goes the link to those that others wrote
        own = {"prefixes": continuations(root, order["prefixes"])}
    reports: list[dict[str, Any]] = []

    def ours() -> None:
        reports.append(core.purge(**own, seconds=timeout))

    try:
        if root:  # the others are asked first: they are at it while we are
            there = purge_directory(
                root,
                **order,
                ours=core.own_shelves(),
                patience=timeout,
                progress=lambda done, total: not core.closed(),
                meanwhile=ours,
            )
    finally:
        if not reports:
            ours()
    report = reports[0]
    if root:
        report = {**merged(report, there), "allocated": there["allocated"]}
    report["done"] = not any(report[left] for left in ("in_use", "used_pages", "unanswered", "failures", "cancelled"))
    report["seconds"] = time.monotonic() - started
    return report


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two reports as one: counts are added, the first error is kept."""
    total = dict(one)
    for name, value in other.items():
        if name in ("done", "cancelled"):
            total[name] = total.get(name, name == "done") and value if name == "done" else total.get(name, False) or value
        elif isinstance(value, int | float):
            total[name] = total.get(name, 0) + value
        else:
            total[name] = total.get(name) or value
    return total
