"""`kvstrata bench disk`: pages of a lease from a cold disk to the device and back, beside raw requests of equal size and depth.

`write`: from publishing until the pages are on disk. `read`: from the lease, in a cache that was just opened, until the pages are
on the device. Limit: O_DIRECT requests of 2 MiB to one file, as many at once as the cache has I/O threads (through the page cache
where the file system knows no O_DIRECT). `read_busy`, `write_busy`: the same while the main thread runs pure Python, against our
own idle figure. Every page is compared after it was read.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstrata.bench.held import FLUSH_S, Tokens, random_tokens
from kvstrata.bench.report import Row, WrongData, compare
from kvstrata.cache import PrefixCache
from kvstrata.gpu import Slab
from kvstrata.identity import Fingerprint, Identity
from kvstrata.layout import PageLayout, PlaneSpec
from kvstrata.limits import Limits

__all__ = ["measure"]

PAGE_SIZE = 256
PAGE_BYTES = 2 << 20
DEPTH = 4
WAIT_S = 60.0


def measure(total_mib: int, rounds: int, folder: str | None, say: Callable[[str], None]) -> Iterator[Row]:
    """About `total_mib` MiB are moved at a time; three times as much lies on disk meanwhile."""
    pages = max(2, (total_mib << 20) // PAGE_BYTES)
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-", dir=folder) as root:
        raw = RawFile(Path(root) / "raw", pages)
        try:
            say(f"writing and reading {pages} pages of 2 MiB, {'O_DIRECT' if raw.direct else 'through the page cache'}")
            yield from figures(f"{root}/cache", raw, pages, rounds)
        finally:
            raw.close()


def figures(root: str, raw: "RawFile", pages: int, rounds: int) -> Iterator[Row]:
    content = np.random.default_rng(0).integers(0, 256, (pages, PAGE_BYTES), np.uint8)
    names = ("write", "write_limit", "write_busy", "read", "read_limit", "read_busy")
    rates: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds + 2):  # the first ones make the files
        for name, busy in (("", False), ("_busy", True)):
            tokens = random_tokens(pages * PAGE_SIZE, 2 * round_ + busy)
            content[:, :8] = np.frombuffer(np.uint64(2 * round_ + busy).tobytes(), np.uint8)
            with open_cache(root, pages) as cache:
                rates[f"write{name}"].append(write(cache, tokens, content, busy))
            with open_cache(root, pages) as cache:
                rates[f"read{name}"].append(read(cache, tokens, content, busy))
        rates["write_limit"].append(raw.write())
        rates["read_limit"].append(raw.read())
    for name, values in rates.items():
        rates[name] = [pages * PAGE_BYTES / seconds / 1e9 for seconds in values[2:]]
    parameters = {"page_size": PAGE_SIZE, "page_mib": PAGE_BYTES >> 20, "pages": pages, "depth": DEPTH, "direct": raw.direct}
    for name in ("read", "write"):
        yield compare(name, "GB/s", rates[name], rates[f"{name}_limit"], **parameters)
    for name in ("read", "write"):
        yield compare(f"{name}_busy", "GB/s", rates[f"{name}_busy"], rates[name], **parameters)


def open_cache(root: str, pages: int) -> PrefixCache:
    plane = PlaneSpec(0, "kv", "uint8", (1, PAGE_BYTES // PAGE_SIZE))
    layout = PageLayout.from_planes([plane], page_size=PAGE_SIZE, dtype="uint8", tag="bench")
    identity = Identity.of({"model_type": "bench"}, layout, Fingerprint("full", bytes(32)))
    limits = Limits(pages, 2 * pages + 16, root, 3 * pages * (layout.slot_bytes + (1 << 16)), io_threads=DEPTH)
    return PrefixCache(layout, limits._replace(load_deadline=WAIT_S), identity=identity)


def write(cache: PrefixCache, tokens: Tokens, content: npt.NDArray[np.uint8], busy: bool) -> float:
    """Seconds."""
    with cache.lease(tokens, leave=0, must=True) as lease:
        cache.pool.data.numpy()[lease.rows, :PAGE_BYTES] = content
        started = time.perf_counter()
        lease.publish(len(tokens))
        if not settled(lambda: cache.flush(0.0), busy, lambda: cache.flush(FLUSH_S)):
            raise WrongData("pages were not written")
        took = time.perf_counter() - started
    if cache.stats()["disk_writes"] != len(content):
        raise WrongData(f"{cache.stats()['disk_writes']} of {len(content)} pages were written")
    return took


def read(cache: PrefixCache, tokens: Tokens, content: npt.NDArray[np.uint8], busy: bool) -> float:
    """Seconds."""
    pool = cache.pool.data.numpy()
    pool[:] = 0  # its memory is there: what is measured is the disk
    Slab(*cache.slab[:3]).bytes()[:] = 0
    started = time.perf_counter()
    with cache.lease(tokens, leave=0, must=True) as lease:
        settled(lambda: lease.ready, busy, lambda: lease.wait(WAIT_S) > 0)
        took = time.perf_counter() - started
        if lease.hit != len(tokens) or lease.sources["disk"] != lease.hit:
            raise WrongData(f"{lease.hit} of {len(tokens)} tokens came, from {lease.sources}")
        if not np.array_equal(pool[lease.rows, :PAGE_BYTES], content):
            raise WrongData("pages did not come back as they were written")
    return took


def settled(done: Callable[[], bool], busy: bool, wait: Callable[[], bool]) -> bool:
    """Waits by `wait`, or by running Python until `done` or WAIT_S have passed."""
    if not busy:
        return wait()
    end = time.perf_counter() + WAIT_S
    while not done() and time.perf_counter() < end:
        sum(number * number for number in range(20_000))  # a millisecond or two that keeps the interpreter to itself
    return done()


class RawFile:
    """A file as large as the pages of a round, written and read by as many threads as the cache has."""

    def __init__(self, path: Path, pages: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags | os.O_DIRECT, 0o600)
            self.direct = True
        except OSError:
            self._file = os.open(path, flags, 0o600)
            self.direct = False
        self.pages = pages
        self._buffers = [mmap.mmap(-1, PAGE_BYTES) for _ in range(DEPTH)]
        for buffer in self._buffers:
            buffer.write(os.urandom(1 << 16) * (PAGE_BYTES >> 16))
        self._threads = ThreadPoolExecutor(DEPTH)
        os.posix_fallocate(self._file, 0, pages * PAGE_BYTES)
        self.write()

    def write(self) -> float:
        """Seconds."""
        return self._all(lambda buffer, at: os.pwritev(self._file, [buffer], at))

    def read(self) -> float:
        """Seconds."""
        if not self.direct:
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        return self._all(lambda buffer, at: os.preadv(self._file, [buffer], at))

    def _all(self, request: Callable[[mmap.mmap, int], int]) -> float:
        def share(thread: int) -> int:
            return sum(request(self._buffers[thread], page * PAGE_BYTES) for page in range(thread, self.pages, DEPTH))

        started = time.perf_counter()
        done = sum(self._threads.map(share, range(DEPTH)))
        took = time.perf_counter() - started
        if done != self.pages * PAGE_BYTES:
            raise WrongData(f"raw requests moved {done} of {self.pages * PAGE_BYTES} bytes")
        return took

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._file)
