"""`kvstrata bench match`: what the serving thread pays to find, pin, publish and evict pages, beside comparing and hashing tokens.

Times of PrefixCache.lease (match, pin and page table), of Lease.publish (keys included) and of a lease for which so many pages must
go. Limits: a compare (memcmp) of the same tokens, and SHA-256 of the bytes that the keys of those pages are made of.
"""

import ctypes
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstrata.bench.held import FLUSH_S, Tokens, held, lease, publish, random_tokens
from kvstrata.bench.report import Row, WrongData, compare
from kvstrata.cache import CacheFull, Lease, PrefixCache

__all__ = ["measure"]

Sweep = npt.NDArray[np.int64]
PROMPTS = 6  # measured in turns, for each way of publishing
TURNS = 128
SWEEP_MOST = 1 << 30  # bytes read to push all else out of the processor's caches
memcmp = ctypes.CDLL(None).memcmp
memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def measure(
    page_sizes: tuple[int, ...], tokens: int, pages: int, rounds: int, folder: str | None, say: Callable[[str], None]
) -> Iterator[Row]:
    """Rows for each page size: prompts of `tokens` tokens among `pages` pages."""
    # Ones: untouched zeros are all one page of memory, and reading them pushes nothing out.
    sweep = np.ones(min(SWEEP_MOST, 2 * last_cache_bytes()) // 8, np.int64)
    for page_size in page_sizes:
        with (
            tempfile.TemporaryDirectory(prefix="kvstrata-bench-", dir=folder) as root,
            held(page_size, pages, 2 * (tokens // page_size + 2), root, say) as cache,
        ):
            yield from matches(cache, tokens, rounds, sweep, say)
            yield from changes(cache, tokens, pages, max(5, rounds // 2))


def matches(
    cache: PrefixCache, tokens: int, rounds: int, sweep: npt.NDArray[np.int64], say: Callable[[str], None]
) -> Iterator[Row]:
    """Leases of prompts that are held, and of one that nobody knows."""
    small = random_tokens(cache.page_size + 1, 1)
    publish(cache, small)
    for turns in (1, TURNS):
        say(f"publishing {PROMPTS} prompts of {tokens:,} tokens in {turns} turn{'s' * (turns > 1)} each")
        prompts = [random_tokens(tokens + 1, 1000 * turns + number) for number in range(PROMPTS)]
        for turn in range(1, turns + 1):
            for one in prompts:
                publish(cache, one[: tokens * turn // turns])
                cache.flush(FLUSH_S)
        stored = [one.copy() for one in prompts]
        parameters: dict[str, Any] = {
            "page_size": cache.page_size,
            "turns": turns,
            "tokens": tokens,
            "held_pages": held_pages(cache),
        }
        cold: list[tuple[float, float]] = []
        hot: list[tuple[float, float]] = []
        for at in range(rounds):
            mine, other = prompts[at % PROMPTS], stored[at % PROMPTS]
            sweep.sum()
            cold.append((timed_lease(cache, mine, tokens, warm=small), 0))
            sweep.sum()
            cold[-1] = (cold[-1][0], timed_compare(mine, other, warm=small))
            for _ in range(2):
                timed_lease(cache, mine, tokens)
                timed_compare(mine, other)
            hot.append((timed_lease(cache, mine, tokens), timed_compare(mine, other)))
        yield compare("match", "ms", *columns(cold), **parameters)
        yield compare("match_hot", "ms", *columns(hot), **parameters)
    numbers = prompts[0].tolist()
    lists = [timed(lambda: np.array(numbers, np.int32)) * 1e3 for _ in range(10)]
    yield compare("from_list", "ms", lists, page_size=cache.page_size, tokens=tokens)
    yield miss(cache, rounds)


def miss(cache: PrefixCache, rounds: int) -> Row:
    """A prompt of one page that nobody knows: no row is reserved for it beyond its own."""
    times = []
    for seed in range(50 * rounds):
        tokens = random_tokens(cache.page_size, 1 << 40 | seed)
        started = time.perf_counter()
        got = cache.lease(tokens)
        times.append((time.perf_counter() - started) * 1e6)
        if isinstance(got, CacheFull) or got.matched:
            raise WrongData("there is no room for an unknown prompt" if not got else "an unknown prompt was found")
        got.release()
    return compare("miss", "us", times, page_size=cache.page_size)


def changes(cache: PrefixCache, tokens: int, pages: int, rounds: int) -> Iterator[Row]:
    """A request of 8,192 (131,072 / 16) or 512 (131,072 / 256) pages that nobody knows, in a pool that is full."""
    count = tokens // cache.page_size
    fill(cache)
    evict, publishing, hashing = [], [], []
    for seed in range(rounds):
        mine = random_tokens(tokens, 1 << 41 | seed)
        cache.flush(FLUSH_S)
        before = cache.stats()["gpu"]["evicted"]
        started = time.perf_counter()
        got = lease(cache, mine)
        evict.append((time.perf_counter() - started) * 1e3)
        if cache.stats()["gpu"]["evicted"] - before != count:
            raise WrongData(f"{cache.stats()['gpu']['evicted'] - before} pages were evicted, not {count}")
        started = time.perf_counter()
        done = got.publish(tokens)
        publishing.append((time.perf_counter() - started) * 1e3)
        if done != tokens:
            raise WrongData(f"{done} of {tokens} tokens were published")
        got.release()
        hashing.append(timed(partial(keys, mine, cache.page_size)) * 1e3)
    yield compare("evict", "ms", evict, page_size=cache.page_size, pages=count, held_pages=pages)
    yield compare("publish", "ms", publishing, hashing, page_size=cache.page_size, pages=count)


def fill(cache: PrefixCache) -> None:
    """Leaves no row free."""
    free = cache.pool.pages - 1 - held_pages(cache)
    if free > 0:
        publish(cache, random_tokens(free * cache.page_size, 1 << 42))


def keys(tokens: Tokens, page_size: int) -> bytes:
    """SHA-256 of what the keys of these pages are computed from, as long as it is: in one go."""
    header = 16 + 32 + 32 + 4 + 4  # tag, namespace, parent, two counts: docs/disk-format.md
    return hashlib.sha256(bytes(len(tokens) // page_size * header) + tokens.tobytes()).digest()


def held_pages(cache: PrefixCache) -> int:
    return int(cache.stats()["gpu"]["pages"])


def timed_lease(cache: PrefixCache, tokens: Tokens, expected: int, warm: Tokens | None = None) -> float:
    """Milliseconds. `warm`: a small prompt asked for just before, and these tokens read: only what the cache stores is cold."""
    if warm is not None:
        for _ in range(3):
            lease(cache, warm).release()
        tokens.sum()
    got, took = lease_once(cache, tokens)
    if isinstance(got, CacheFull):
        raise got
    if got.hit != expected:
        raise WrongData(f"{got.hit} of {expected} cached tokens were found")
    if len(np.unique(got.rows)) != -(-len(tokens) // cache.page_size):
        raise WrongData("the page table names a row twice")
    got.release()
    return took


def lease_once(cache: PrefixCache, tokens: Tokens) -> tuple[Lease | CacheFull, float]:
    """With the milliseconds it took."""
    started = time.perf_counter()
    got = cache.lease(tokens)
    return got, (time.perf_counter() - started) * 1e3


def timed_compare(tokens: Tokens, stored: Tokens, warm: Tokens | None = None) -> float:
    if warm is not None:
        memcmp(warm.ctypes.data, warm.ctypes.data, warm.nbytes)
        tokens.sum()
    here, there, size = tokens.ctypes.data, stored.ctypes.data, tokens.nbytes
    started = time.perf_counter()
    differ = memcmp(here, there, size)
    took = (time.perf_counter() - started) * 1e3
    if differ:
        raise WrongData("equal tokens compare unequal")
    return took


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def columns(pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [ours for ours, _ in pairs], [limit for _, limit in pairs]


def last_cache_bytes() -> int:
    """Of the largest processor cache; 32 MiB where the kernel does not tell."""
    sizes = [32 << 20]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(file.read_text().strip().removesuffix("K")) << 10)
    return max(sizes)
