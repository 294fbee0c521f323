"""SimDevice keeps the order it promises and no other, and leases on it refuse what would need more."""

import threading

import numpy as np
import pytest
from support import PAGE, POISON, device_row, fill, prompt, settle, tiny_layout, wrong

from kvstrata.cache import Limits, PrefixCache
from kvstrata.gpu import Copy, PagePool, Slab
from kvstrata.sim_device import SimDevice


@pytest.fixture
def device():
    device = SimDevice(seed=1, delay=1e-3, calm=0.3)
    yield device
    device.close()


def test_kernels_run_in_order_and_late(device):
    ran = []
    fences = []
    for i in range(50):
        device.compute(lambda i=i: ran.append(i))
        fences.append(device.mark_batch())
    assert fences == list(range(1, 51))
    assert device.marked == 50
    assert len(ran) < 50, "it ran at once: nothing is simulated"
    assert device.synchronize(30)
    assert ran == list(range(50))


def make_copy(device: SimDevice, fence: int, up: bool = False):
    layout = tiny_layout()
    pool = PagePool(layout, 4, device)
    memory = np.zeros((4, layout.row_stride), np.uint8)
    slab = Slab(memory.ctypes.data, 4, layout.row_stride)
    copy = Copy(1, up, np.array([0, 1], np.int32), np.array([2, 3], np.int32), fence)
    return pool, memory, slab, copy


def test_a_copy_waits_for_its_fence_and_for_nothing_else(device):
    gate = threading.Event()
    pool, memory, slab, _ = make_copy(device, 0)
    device.compute(lambda: pool.data[2].fill_(7))
    first = device.mark_batch()
    device.compute(gate.wait)
    device.compute(lambda: pool.data[3].fill_(9))
    second = device.mark_batch()
    early = device.start(Copy(1, False, np.array([0], np.int32), np.array([2], np.int32), first), pool, slab)
    assert early.result()
    assert (memory[0, : pool.layout.row_bytes] == 7).all()
    late = device.start(Copy(2, False, np.array([1], np.int32), np.array([3], np.int32), second), pool, slab)
    assert (memory[1] == 0).all()
    gate.set()
    assert late.result()
    assert (memory[1, : pool.layout.row_bytes] == 9).all()


def test_a_copy_behind_a_batch_that_does_not_exist_is_refused(device):
    pool, _, slab, copy = make_copy(device, fence=1)
    with pytest.raises(RuntimeError, match="batch 1"):
        device.start(copy, pool, slab)


def test_a_kernel_waits_for_the_layers_it_names(device):
    pool, memory, slab, copy = make_copy(device, 0, up=True)
    memory[:] = 5
    device.stall()
    seen = []
    transfer = device.start(copy, pool, slab)
    assert transfer.wait_layer(1, None)
    offset, size = pool.layout.layer_range(1)
    device.compute(lambda: seen.append(pool.data[2, offset : offset + size].clone()))
    device.resume()
    assert device.synchronize(30)
    assert (seen[0] == 5).all()


def test_a_copy_can_be_made_to_fail(device):
    pool, memory, slab, copy = make_copy(device, 0)
    device.fail_copy(2)
    assert device.start(copy, pool, slab).result()
    memory[:] = 0
    assert not device.start(copy, pool, slab).result()
    assert (memory[0, :32] == POISON).all()
    assert (memory[1] == 0).all(), "it did more than half of the work"


def test_publishing_without_a_readiness_fence_is_refused():
    device = SimDevice(seed=2)
    with PrefixCache(tiny_layout(), Limits(8, 8), device=device) as cache, cache.lease(prompt(2)) as lease:
        assert lease.wait() == 0
        with pytest.raises(ValueError, match="needs ready="):
            lease.publish(2 * PAGE)
        with pytest.raises(ValueError, match="ready=1 is no batch"):
            lease.publish(2 * PAGE, ready=1)
        with pytest.raises(ValueError, match="ready=-1 is no batch"):
            lease.publish(2 * PAGE, ready=-1)
        with pytest.raises(ValueError, match="fence=9 is no batch"):
            lease.release(fence=9)
        assert cache.stats()["gpu"]["pages"] == 0
        assert lease.publish(2 * PAGE, ready=cache.pool.mark_batch()) == 2 * PAGE


def test_where_nothing_runs_late_no_fence_is_needed():
    with PrefixCache(tiny_layout(), Limits(8, 8)) as cache, cache.lease(prompt(2)) as lease:
        lease.wait()
        with pytest.raises(ValueError, match="ready=5 is no batch"):
            lease.publish(2 * PAGE, ready=5)
        assert lease.publish(2 * PAGE) == 2 * PAGE


def fail_half_way(cache: PrefixCache, device: SimDevice, gate: threading.Event) -> None:
    with cache.lease(prompt(4, seed=3)) as lease:
        rows = lease.rows
        device.compute(gate.wait)
        device.compute(lambda: [device_row(cache, row).fill(POISON) for row in rows])
        raise ZeroDivisionError


def test_release_without_a_fence_waits_for_what_was_submitted():
    """The rows of a request that fails half way go to a page that is loaded: its bytes must not be overwritten by late kernels."""
    device = SimDevice(seed=3)
    with PrefixCache(tiny_layout(), Limits(4, 16), device=device, poison=True) as cache:
        first, second = prompt(4, seed=1), prompt(4, seed=2)
        for tokens in (first, second):
            with cache.lease(tokens) as lease:
                rows = lease.rows
                device.compute(lambda rows=rows, tokens=tokens: fill(cache, rows, tokens, 0, 4))
                lease.publish(len(tokens), ready=cache.pool.mark_batch())
            settle(cache)
        gate = threading.Event()
        with pytest.raises(ZeroDivisionError):
            fail_half_way(cache, device, gate)
        again = cache.lease(first, leave=0)
        assert again.matched == len(first)
        assert not again.ready
        gate.set()
        assert again.wait() == len(first)
        assert not wrong(cache, again.rows, first, 4)
        again.release(0)
