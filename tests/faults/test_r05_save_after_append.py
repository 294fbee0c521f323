"""R5: saving right after appending must not store pages that the device has not written yet."""

import threading

import pytest
from support import PAGE, ByHand, crowd, device_row, fill, fingerprint, prompt, serve, settle, until
from unguarded import assert_needed

from kvstrata.gpu import HostDevice


class LateDevice(HostDevice):
    """A device whose batches run when the test says so, as on a GPU with a deep queue; copies wait for the batch they name."""

    def __init__(self):
        super().__init__()
        self.work = []  # of the batch that is being submitted
        self.batches = {}  # submitted, not run yet
        self.ran = 0
        self.changed = threading.Condition()
        self.order = []  # (fence of a copy, batches that had run when it started)

    def mark_batch(self):
        fence = super().mark_batch()
        self.batches[fence] = self.work
        self.work = []
        return fence

    def run_batches(self):
        with self.changed:
            for fence in sorted(self.batches):
                for step in self.batches.pop(fence):
                    step()
                self.ran = fence
            self.changed.notify_all()

    def start(self, copy, pool, slab):
        with self.changed:
            assert self.changed.wait_for(lambda: self.ran >= copy.fence, 60)
            self.order.append((copy.fence, self.ran))
        return super().start(copy, pool, slab)


def test_bytes_are_read_after_the_batch_that_writes_them(open_cache, tmp_path):
    device = LateDevice()
    cache = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk", device=device)
    tokens = prompt(6, seed=6)
    with cache.lease(tokens) as lease:
        lease.wait()
        for page in range(6):  # append, publish, append, publish: nothing has run when everything is published
            device.work = [lambda page=page: fill(cache, lease.rows, tokens, page, page + 1)]
            device_row(cache, lease.rows[page])[:] = 0xEE
            fence = cache.pool.mark_batch()
            assert lease.publish((page + 1) * PAGE, ready=fence) == (page + 1) * PAGE
        rows = lease.rows.copy()
        lease.release(fence)
        assert cache.stats()["cpu"]["pages"] == 0
        device.run_batches()
    settle(cache)
    assert device.order
    assert all(ran >= fence > 0 for fence, ran in device.order)
    assert (device_row(cache, rows[5]) == fingerprint(cache.layout, cache.namespace(), tokens)).all()
    device.ran = 1 << 60  # from here on batches run at once
    crowd(cache)
    assert serve(cache, tokens).cpu == 80
    cache.close()
    cache = open_cache(gpu=8, cpu=8, disk=tmp_path / "disk")
    assert serve(cache, tokens).disk == 80


def test_generated_tokens_are_saved_with_the_batch_that_wrote_them(open_cache):
    device = LateDevice()
    cache = open_cache(gpu=8, cpu=16, device=device)
    tokens = prompt(3, seed=7)
    lease = cache.lease(tokens[:20], reserve=28)
    lease.wait()
    rows = lease.rows
    for at in range(20, 48):
        lease.append(tokens[at : at + 1])
        device.work = [lambda at=at: fill(cache, rows, tokens, 0, (at + 1) // PAGE)]
        lease.publish(at + 1, ready=cache.pool.mark_batch())
    lease.release(cache.pool.mark_batch())
    until(lambda: not device.order and cache.stats()["gpu"]["pages"] == 3, "three pages findable, none copied")
    device.run_batches()
    settle(cache)
    assert all(ran >= fence > 0 for fence, ran in device.order)
    device.ran = 1 << 60
    crowd(cache)
    assert serve(cache, tokens).cpu == 32


def test_a_copy_of_several_pages_waits_for_the_latest_of_them():
    hand = ByHand(gpu_rows=8, cpu_rows=8)
    lease = hand.lease(prompt(4, seed=8))
    for page, fence in ((1, 5), (2, 6), (3, 9)):
        hand.driver.publish(0.0, lease, page * PAGE, fence)
    hand.step()
    ((_, up, _, rows, fence),) = hand.copies
    assert not up
    assert len(rows) == 3
    assert fence == 9
    hand.release(lease, 10)


@pytest.mark.guards
def test_what_keeps_it_from_happening():
    """Without one line a copy would not wait for the batch that writes what it reads, and the tests above see it."""
    assert_needed("ready_fence", __file__, "test_a_copy_of_several_pages_waits_for_the_latest_of_them")
