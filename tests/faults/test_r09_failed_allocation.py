"""R9: when room cannot be had, the request that wanted it goes without: nobody else's pages are dropped for it."""

import pytest
from support import ByHand, GatedDevice, begin, crowd, prompt, serve, settle, until
from unguarded import assert_needed

from kvstrata.cache import CacheFull


def pages(cache, tier):
    return cache.stats()[tier]["pages"], cache.stats()[tier]["evicted"] + cache.stats()[tier]["dropped"]


def test_a_lease_that_does_not_fit_evicts_nothing(open_cache):
    cache = open_cache(gpu=12, cpu=12)
    known = prompt(6, seed=1)
    serve(cache, known)
    settle(cache)
    live = begin(cache, prompt(4, seed=2))
    before = pages(cache, "gpu"), pages(cache, "cpu")
    now, never = cache.lease(prompt(9, seed=3)), cache.lease(prompt(13, seed=3))
    assert isinstance(now, CacheFull)
    assert isinstance(never, CacheFull)
    assert (now.never, now.needed, now.available) == (False, 9, 8)
    assert (never.never, never.needed, never.available) == (True, 13, 12)
    assert (pages(cache, "gpu"), pages(cache, "cpu")) == before
    assert serve(cache, known[:80]).gpu == 64
    live.release()


def test_growing_in_vain_evicts_nothing(open_cache):
    cache = open_cache(gpu=12)
    known = prompt(6, seed=1)
    serve(cache, known)
    live = begin(cache, prompt(4, seed=2))
    before = pages(cache, "gpu")
    assert not live.grow(9 * cache.page_size)
    assert pages(cache, "gpu") == before
    assert len(live.rows) == 4
    with begin(cache, known, leave=0) as lease:
        assert lease.hit == 96
    assert live.grow(8 * cache.page_size)  # exactly what there is
    live.release()


def test_a_prefix_on_disk_finds_no_row_in_ram(open_cache, tmp_path):
    """All rows of the slab are being copied from: the load is given up, and the rows' pages stay."""
    device = GatedDevice()
    cache = open_cache(gpu=20, cpu=4, disk=tmp_path / "disk", device=device)
    cold, warm = prompt(4, seed=1), prompt(4, seed=2)
    for tokens in (cold, warm):
        serve(cache, tokens)
        settle(cache)
    empty_gpu(cache)
    assert cache.stats()["cpu"]["pages"] == 4
    device.ups.clear()
    first = cache.lease(warm, leave=0)
    assert first.sources == {"gpu": 0, "cpu": 64, "disk": 0}
    until(lambda: device.started and device.started[-1].up, "the copies to begin")
    second = cache.lease(cold, leave=0)
    assert second.sources == {"gpu": 0, "cpu": 0, "disk": 64}
    assert second.wait(timeout=0) == 0
    assert pages(cache, "cpu")[0] == 4
    device.ups.set()
    assert first.wait() == 64
    first.release()
    second.release()
    settle(cache)
    assert cache.stats()["cpu"]["pages"] == 4
    assert serve(cache, cold).disk == 48


def empty_gpu(cache):
    """Empties the GPU of all pages: requests that publish nothing take its rows."""
    whole = cache.lease(prompt(cache.pool.pages - 1, seed=77), read=False, write=False, must=True)
    whole.release()
    assert cache.stats()["gpu"]["pages"] == 0


def test_failing_copies_cost_only_their_own_pages(open_cache):
    device = GatedDevice()
    cache = open_cache(gpu=8, cpu=24, device=device)
    known = [prompt(4, seed) for seed in range(4)]
    for tokens in known:
        serve(cache, tokens)
        settle(cache)
    device.fail_downs = True
    crowd(cache, prompts=2)
    device.fail_downs = False
    assert cache.stats()["cpu"]["pages"] == 16
    device.fail_ups = True
    assert serve(cache, known[0]).hit == 0
    device.fail_ups = False
    for tokens in known:
        settle(cache)
        served = serve(cache, tokens)
        assert served.cpu + served.gpu == 48


def test_no_row_for_a_save():
    """Every row of the slab is on its way to the device: the save waits in its queue and takes nobody's row."""
    hand = ByHand(gpu_rows=12, cpu_rows=4)
    warm, new = prompt(4, seed=1), prompt(4, seed=2)
    hand.release(hand.publish(warm))
    hand.finish_copies()
    hand.release(hand.lease(prompt(12, seed=3), read=False))
    assert hand.where(warm) == [(0, 2, 0)] * 4
    lease = hand.lease(warm, leave=0)
    assert [copy[1] for copy in hand.copies] == [True]
    hand.release(hand.publish(new))
    assert len(hand.copies) == 1
    assert hand.where(new) == [(2, 0, 0)] * 4
    hand.finish_copies(up=True)
    assert hand.hit(lease) == 4
    hand.release(lease)
    hand.finish_all()
    assert hand.where(new) == [(2, 2, 0)] * 4


@pytest.mark.guards
def test_what_keeps_it_from_happening():
    """Without one line pages would go for a request that does not fit, and the tests above see it."""
    assert_needed("room_first", __file__, "test_a_lease_that_does_not_fit_evicts_nothing")
