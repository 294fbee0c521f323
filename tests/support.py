"""Small caches whose rows tell whose they are, and devices that wait: for tests of the whole cache. Fingerprints: pages.py."""

import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pages import PAGE as PAGE
from pages import fingerprint as fingerprint
from pages import prompt as prompt
from pages import tiny_identity as tiny_identity
from pages import tiny_layout as tiny_layout

from kvstrata.cache import CacheFull, Lease, PrefixCache
from kvstrata.gpu import Copy, HostDevice, PagePool, Slab, Transfer

POISON = 0xEE  # of device rows that nobody computed yet; freed slab rows are 0xDB
SLAB_POISON = 0xDB


# --- rows


def device_row(cache: PrefixCache, row: int) -> np.ndarray:
    """uint8 `[row_bytes]`, a view."""
    return cache.pool.data[int(row), : cache.layout.row_bytes].numpy()


def fill(cache: PrefixCache, rows: Sequence[int], tokens: Any, first: int, last: int, space: bytes | None = None) -> None:
    """Computes pages [first, last) of the tokens into their rows."""
    for page in range(first, last):
        prefix = tokens[: (page + 1) * cache.page_size]
        device_row(cache, rows[page])[:] = fingerprint(cache.layout, space or cache.namespace(), prefix)


def wrong(cache: PrefixCache, rows: Sequence[int], tokens: Any, pages: int, space: bytes | None = None) -> list[int]:
    """Which of the first pages do not hold their fingerprints."""
    space = space or cache.namespace()
    return [
        page
        for page in range(pages)
        if not np.array_equal(
            device_row(cache, rows[page]), fingerprint(cache.layout, space, tokens[: (page + 1) * cache.page_size])
        )
    ]


class Served(NamedTuple):
    """What a request got: tokens reused, in all and by tier."""

    hit: int
    gpu: int
    cpu: int
    disk: int


def begin(cache: PrefixCache, tokens: Any, *, timeout: float | None = None, **options: Any) -> Lease:
    """A lease whose hit is there and right, and whose other rows are poisoned, as they would be by whoever had them before."""
    lease = roomy(cache, tokens, **options)
    space = cache.namespace(options.get("adapter"), options.get("tenant"))
    hit = lease.wait(timeout) // cache.page_size
    while lease.lost:  # pages did not come and the pool has no row for computing them
        lease.release()
        lease = roomy(cache, tokens, **options)
        hit = lease.wait(timeout) // cache.page_size
    assert not wrong(cache, lease.rows, tokens, hit, space), "a reused page does not hold its own bytes"
    for row in lease.rows[hit:]:
        device_row(cache, row)[:] = POISON
    return lease


def roomy(cache: PrefixCache, tokens: Any, **options: Any) -> Lease:
    """A lease, as soon as there is room: rows of requests that ended are in use while their pages are still being saved."""
    got = cache.lease(tokens, **options)
    end = time.monotonic() + 60
    while isinstance(got, CacheFull):
        if got.never or time.monotonic() > end:
            raise got
        time.sleep(0.001)
        got = cache.lease(tokens, **options)
    return got


def finish(cache: PrefixCache, lease: Lease, tokens: Any, *, space: bytes | None = None) -> Served:
    """Computes and publishes what is missing, checks all rows once more and gives the lease back."""
    served = Served(lease.hit, **lease.sources)
    pages = len(tokens) // cache.page_size
    fill(cache, lease.rows, tokens, lease.hit // cache.page_size, pages, space)
    lease.publish(len(tokens), ready=cache.pool.mark_batch())
    assert not wrong(cache, lease.rows, tokens, pages, space), "a page of a running request was overwritten"
    lease.release(fence=cache.pool.mark_batch())
    return served


def serve(cache: PrefixCache, tokens: Any, **options: Any) -> Served:
    """One request from lookup to release, as an engine runs it."""
    return finish(
        cache,
        begin(cache, tokens, **options),
        tokens,
        space=cache.namespace(options.get("adapter"), options.get("tenant")),
    )


def crowd(cache: PrefixCache, prompts: int = 1, *, pages: int | None = None, seed: int = 1 << 20) -> None:
    """Traffic that pushes others out: so many new prompts, each as large as the device pool, saved one after the other."""
    for i in range(prompts):
        serve(cache, prompt(pages or cache.pool.pages - 1, seed + i, cache.page_size))
        settle(cache)


def settle(cache: PrefixCache, seconds: float = 60) -> None:
    assert cache.flush(seconds), "moves did not come to an end"


def until(condition: Callable[[], Any], what: str, seconds: float = 60) -> None:
    """Waits for something that must come true; fails with `what` when it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.001)


# --- devices


class GatedDevice(HostDevice):
    """Host memory whose copies wait while their gate is closed: `ups` (slab -> pool), `downs` (pool -> slab)."""

    def __init__(self) -> None:
        super().__init__()
        self.ups, self.downs = threading.Event(), threading.Event()
        self.ups.set()
        self.downs.set()
        self.fail_ups = self.fail_downs = False
        self.started: list[Copy] = []

    def start(self, copy: Copy, pool: PagePool, slab: Slab) -> Transfer:
        self.started.append(copy)
        assert (self.ups if copy.up else self.downs).wait(60)
        if self.fail_ups if copy.up else self.fail_downs:
            raise RuntimeError("this copy was made to fail")
        return super().start(copy, pool, slab)


# --- the disk


def find_on_disk(root: Path, content: np.ndarray) -> list[tuple[Path, int]]:
    """Where these bytes lie: (file, offset)."""
    places = []
    for path in sorted(root.rglob("*.kvs")):
        data, needle = path.read_bytes(), content.tobytes()
        at = data.find(needle)
        while at >= 0:
            places.append((path, at))
            at = data.find(needle, at + 1)
    return places


def flip(path: Path, offset: int) -> None:
    """Damages one byte of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def disk_usage(root: Path) -> int:
    """Allocated bytes of everything under a directory, itself included."""
    return sum(path.lstat().st_blocks * 512 for path in [root, *root.rglob("*")] if path.exists())


@contextmanager
def no_writes_beyond(size: int) -> Iterator[None]:
    """Writes of this process behind this offset of a file fail (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- the driver by hand


class ByHand:
    """`_core.Driver` with a clock that the test turns, and everything it starts kept until the test lets it finish."""

    def __init__(self, **options: Any) -> None:
        from kvstrata._core import Driver

        self.driver = Driver(page_size=PAGE, **options)
        self.space = b"\5" * 32
        self.now = 0.0
        self.ops: list[tuple[int, str, tuple[int, int], int, bytes]] = []
        self.copies: list[tuple[int, bool, np.ndarray, np.ndarray, int]] = []
        self.segments = 0

    def step(self, done: Sequence[tuple[int, str, list[tuple[int, int]]]] = ()) -> None:
        ops, copies = self.driver.step(self.now, list(done))
        self.ops += ops
        self.copies += copies
        assert self.driver.check_integrity() == ""

    def lease(self, tokens: Any, **options: Any) -> int:
        """The lease's id, 0 when the pool is full."""
        number: int = self.driver.lease(self.now, space=self.space, tokens=np.asarray(tokens, np.int32), **options)[0]
        self.step()
        return number

    def publish(self, tokens: Any, ready: int = 0, **options: Any) -> int:
        """A request that computed all its tokens; the lease is still open."""
        number = self.lease(tokens, **options)
        assert number
        self.driver.publish(self.now, number, len(tokens), ready)
        self.step()
        return number

    def release(self, number: int, fence: int = 0) -> None:
        self.driver.release(self.now, number, fence)
        self.step()

    def finish_copies(self, ok: bool = True, up: bool | None = None) -> int:
        """Ends the copies under way; how many."""
        ended = [copy for copy in self.copies if up is None or copy[1] == up]
        self.copies = [copy for copy in self.copies if copy not in ended]
        for ticket, *_ in ended:
            self.driver.copied(self.now, ticket, ok)
        self.step()
        return len(ended)

    def finish_ops(self, status: Callable[[str, tuple[int, int]], str] = lambda kind, slot: "ok", kind: str | None = None) -> int:
        """Ends the disk operations under way, each with the status that `status(kind, slot)` says; how many."""
        ended = [op for op in self.ops if kind is None or op[1] == kind]
        self.ops = [op for op in self.ops if op not in ended]
        done = []
        for number, what, slot, _, _ in ended:
            result = status(what, slot)
            slots = []
            if what == "grow" and result == "ok":
                slots = [(self.segments, i) for i in range(4)]
                self.segments += 1
            done.append((number, result, slots))
        self.step(done)
        return len(ended)

    def finish_all(self) -> None:
        """Until nothing moves any more."""
        while self.finish_copies() + self.finish_ops():
            pass

    def where(self, tokens: Any) -> list[tuple[int, int, int]]:
        """Per page (gpu, cpu, disk): 0 no copy, 1 on its way, 2 there."""
        return list(self.driver.where(self.space, np.asarray(tokens, np.int32)))

    def hit(self, number: int) -> int:
        """Pages of the lease's hit."""
        pages: int = self.driver.state(number)[1]
        return pages

    def stats(self) -> dict[str, Any]:
        return dict(self.driver.stats())
