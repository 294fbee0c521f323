"""A cache that has lived: three tiers, the device pool full, and twice as many pages published and evicted before.

What it holds lies where such a life leaves it: rows and records of neighbouring pages are not neighbours in memory.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvstrata.cache import CacheFull, Lease, PrefixCache
from kvstrata.identity import Fingerprint, Identity
from kvstrata.layout import PageLayout, PlaneSpec
from kvstrata.limits import Limits

__all__ = ["FLUSH_S", "Tokens", "held", "lease", "publish", "random_tokens"]

Tokens = npt.NDArray[np.int32]
ROW_BYTES = 4096
SLAB_ROWS = 4096
DISK_BYTES = 256 << 20
FLUSH_S = 60.0
VOCABULARY = 100_000


@contextmanager
def held(page_size: int, pages: int, room: int, folder: str, say: Callable[[str], None]) -> Iterator[PrefixCache]:
    """A cache with `pages` pages on the device and room for `room` more, with a CPU tier and a disk tier in `folder`."""
    plane = PlaneSpec(0, "k", "uint8", (1, max(1, ROW_BYTES // page_size)))
    layout = PageLayout.from_planes([plane], page_size=page_size, dtype="uint8", tag="bench")
    identity = Identity.of({"model_type": "bench"}, layout, Fingerprint("full", bytes(32)))
    limits = Limits(pages + room, SLAB_ROWS, folder, DISK_BYTES)
    with PrefixCache(layout, limits, identity=identity) as cache:
        say(f"publishing {3 * pages:,} pages of {page_size} tokens, of which {pages:,} stay")
        live(cache, 3 * pages, most=max(1, pages // 100))
        cache.flush(FLUSH_S)  # what is being saved cannot go: until then newer pages would have to
        yield cache


def live(cache: PrefixCache, pages: int, most: int) -> None:
    """Publishes so many pages: prompts of up to `most` pages, one in three of which continues an earlier one."""
    dice = random.Random(1)
    earlier: list[Tokens] = []
    while pages > 0:
        count = dice.randint(1, min(most, pages))
        tokens = random_tokens(count * cache.page_size, dice.getrandbits(62))
        if earlier and dice.random() < 1 / 3:
            before = dice.choice(earlier)
            shared = before[: dice.randint(1, len(before) // cache.page_size) * cache.page_size]
            tokens = np.concatenate([shared, tokens])[: most * cache.page_size]
        publish(cache, tokens)
        pages -= count
        earlier.append(tokens)
        del earlier[:-32]


def publish(cache: PrefixCache, tokens: Tokens) -> None:
    """A request that computes and publishes what nobody did before it."""
    with lease(cache, tokens) as mine:
        mine.publish(len(tokens))


def lease(cache: PrefixCache, tokens: Tokens) -> Lease:
    """A lease, as soon as the pages of others are saved and may go. Raises CacheFull where they do not within a minute."""
    end = time.monotonic() + FLUSH_S
    while isinstance(got := cache.lease(tokens), CacheFull):
        if got.never or time.monotonic() > end:
            raise got
        cache.flush(0.01)
    return got


def random_tokens(count: int, seed: int) -> Tokens:
    """int32 `[count]`."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, np.int32)
