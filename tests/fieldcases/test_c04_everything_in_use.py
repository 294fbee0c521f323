"""C4: when all of RAM is in use, saving drops and loading gives a shorter hit, both at once; afterwards everything goes on."""

import threading
import time

import numpy as np
import pytest
from support import PAGE, GatedDevice, begin, crowd, fingerprint, finish, prompt, serve, settle, until, wrong

from kvstrata._core import copy_rows

SOON = 2.0  # seconds: what 100 ms may become on a busy machine; nothing here waits for less than 5 unless it is told to


class Blocks:
    """Device blocks of an engine that owns its memory, and the copies between them and the slab."""

    def __init__(self, cache, blocks):
        self.cache = cache
        self.bytes = np.full((blocks, cache.layout.row_bytes), 0xEE, np.uint8)

    def carry(self, ok=True):
        address, _, stride, _ = self.cache._core.slab()
        mine = (self.bytes.ctypes.data, self.bytes.shape[1])
        for ticket, up, slab, device, _ in self.cache._core.take_copies(5.0):
            there, here = (*mine, device), (address, stride, slab)
            copy_rows(*(there if up else here), *(here if up else there), 0, self.cache.layout.row_bytes)
            self.cache._core.copied(ticket, ok)

    def store(self, tokens):
        """Pages that were saved."""
        pages = len(tokens) // PAGE
        for page in range(pages):
            self.bytes[page] = fingerprint(self.cache.layout, self.cache.namespace(), tokens[: (page + 1) * PAGE])
        before = self.cache.stats()["downs"]
        with self.cache.lease(tokens, read=False) as lease:
            ticket = lease.save(0, np.arange(pages, dtype=np.int32), 0)
            if ticket:
                self.carry()
            assert lease.wait_copy(ticket)
        return self.cache.stats()["downs"] - before

    def check(self, lease, tokens):
        """Loads the hit into the blocks and compares."""
        pages = lease.hit // PAGE
        self.bytes[:] = 0xEE
        ticket = lease.load(0, np.arange(pages, dtype=np.int32))
        self.carry()
        assert lease.wait_copy(ticket)
        for page in range(pages):
            wanted = fingerprint(self.cache.layout, self.cache.namespace(), tokens[: (page + 1) * PAGE])
            assert np.array_equal(self.bytes[page], wanted)


def test_all_pages_pinned_by_an_engine_with_its_own_device_memory(open_cache, tmp_path):
    cache = open_cache(gpu=0, cpu=6, disk=tmp_path / "disk", load_deadline=60.0)
    engine = Blocks(cache, 8)
    cold, warm, new = prompt(3, seed=1), prompt(6, seed=2), prompt(4, seed=3)
    for tokens in (cold, warm):
        for pages in range(1, len(tokens) // PAGE + 1):  # half of the slab may wait for the disk
            engine.store(tokens[: pages * PAGE])
            settle(cache)
    holder = cache.lease(warm, leave=0)
    assert holder.wait() == 6 * PAGE
    assert cache.stats()["cpu"]["free"] == 0

    started = time.monotonic()
    dropped = cache.stats()["saves_dropped"]
    assert engine.store(new) == 0
    assert cache.stats()["saves_dropped"] == dropped + 4
    assert time.monotonic() - started < SOON

    started = time.monotonic()
    starved = cache.lease(cold, leave=0)
    assert starved.matched == 3 * PAGE
    assert starved.wait(timeout=0.1) == 0
    assert time.monotonic() - started < SOON
    starved.release()

    engine.check(holder, warm)
    holder.release()
    assert engine.store(new) == 3  # at once, as much as may wait for the disk
    settle(cache)
    with cache.lease(cold, leave=0) as lease:
        assert lease.wait() == 3 * PAGE
        engine.check(lease, cold)


def test_all_rows_held_by_copies_to_the_device(open_cache, tmp_path):
    device = GatedDevice()
    cache = open_cache(gpu=24, cpu=4, disk=tmp_path / "disk", device=device, load_deadline=60.0)
    cold, warm, new = prompt(4, seed=1), prompt(4, seed=2), prompt(4, seed=3)
    for tokens in (cold, warm):
        serve(cache, tokens)
        settle(cache)
    cache.lease(prompt(24, seed=4), read=False, write=False, must=True).release()  # empties the device
    device.ups.clear()
    holder = cache.lease(warm, leave=0)
    assert holder.sources["cpu"] == 4 * PAGE
    until(lambda: device.started[-1].up, "the copies to begin")

    started = time.monotonic()
    assert serve(cache, new).hit == 0  # publishes four pages; nothing in it waits for RAM
    starved = begin(cache, cold, timeout=0.1)
    assert starved.matched == 3 * PAGE
    assert starved.hit == 0
    finish(cache, starved, cold)
    assert time.monotonic() - started < SOON

    device.ups.set()
    assert holder.wait() == 4 * PAGE
    assert not wrong(cache, holder.rows, warm, 4)
    holder.release()
    settle(cache)  # capacity is usable at once: what waited has been saved by now
    assert cache.stats()["disk"]["pages"] == 12
    crowd(cache)
    assert serve(cache, new).disk == 3 * PAGE


def test_a_publish_that_ram_cannot_take_is_dropped_when_the_device_needs_the_row(open_cache, tmp_path):
    device = GatedDevice()
    cache = open_cache(gpu=8, cpu=4, device=device)
    warm, new = prompt(4, seed=2), prompt(4, seed=3)
    serve(cache, warm)
    settle(cache)
    cache.lease(prompt(8, seed=4), read=False, write=False, must=True).release()
    device.ups.clear()
    holder = cache.lease(warm, leave=0)
    until(lambda: device.started[-1].up, "the copies to begin")
    serve(cache, new)
    other = prompt(4, seed=5)
    assert serve(cache, other).hit == 0  # takes the rows of `new`, which nobody could save
    device.ups.set()
    assert holder.wait() == 4 * PAGE
    holder.release()
    settle(cache)
    assert cache.stats()["saves_dropped"] == 4
    with cache.lease(new) as lease:
        assert lease.matched == 0


@pytest.mark.parametrize("cpu", [1, 2, 8])
def test_ram_smaller_than_the_device_keeps_feeding_the_disk(open_cache, tmp_path, cpu):
    cache = open_cache(gpu=32, cpu=cpu, disk=tmp_path / "disk", disk_bytes=2 << 20)
    seeds = iter(range(1 << 20))
    for _ in range(8):
        before = cache.stats()["disk_writes"]
        end = time.monotonic() + 30
        while cache.stats()["disk_writes"] < before + 40:
            assert time.monotonic() < end, "the disk receives no pages any more"
            serve_when_there_is_room(cache, prompt(3, next(seeds)))
    settle(cache)
    last = prompt(6, next(seeds))
    serve(cache, last)
    settle(cache)
    cache.close()
    cache = open_cache(gpu=32, cpu=cpu, disk=tmp_path / "disk", disk_bytes=2 << 20)
    assert serve(cache, last).disk == 5 * PAGE


def serve_when_there_is_room(cache, tokens):
    until(lambda: (lease := cache.lease(tokens)) and [lease.release()], "a row for a request")
    serve(cache, tokens)


def test_many_wait_for_ram_that_nobody_frees(open_cache, tmp_path):
    """Twenty requests at once want cold prefixes while all rows are held: each is settled by its own deadline."""
    device = GatedDevice()
    cache = open_cache(gpu=60, cpu=4, disk=tmp_path / "disk", device=device, load_deadline=60.0)
    warm, colds = prompt(4, seed=2), [prompt(2, seed) for seed in range(10, 30)]
    for tokens in (*colds, warm):
        serve(cache, tokens)
        settle(cache)
    cache.lease(prompt(60, seed=4), read=False, write=False, must=True).release()
    device.ups.clear()
    holder = cache.lease(warm, leave=0)
    until(lambda: device.started[-1].up, "the copies to begin")
    hits = []

    def ask(tokens):
        with cache.lease(tokens, leave=0, must=True) as lease:
            hits.append((lease.matched, lease.wait(timeout=0.1)))

    threads = [threading.Thread(target=ask, args=(tokens,)) for tokens in colds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert hits == [(2 * PAGE, 0)] * 20
    device.ups.set()
    assert holder.wait() == 4 * PAGE
    holder.release()
    settle(cache)
    for tokens in colds:
        assert serve(cache, tokens, leave=0).disk == 2 * PAGE
