"""R7: a write that failed is never taken for done: the page is not matched later, in this run or the next, and is written again."""

import pytest
from support import PAGE, ByHand, GatedDevice, crowd, no_writes_beyond, prompt, serve, settle, until
from unguarded import assert_needed

TABLE_END = 8192  # of a small segment: its header and its table of records lie before


@pytest.mark.parametrize("limit", [0, 4096, TABLE_END, TABLE_END + 3 * 8192])
@pytest.mark.parametrize("segment_exists", [True, False])
def test_the_disk_refuses_pages(open_cache, tmp_path, limit, segment_exists):
    """Writes fail in the header of a new segment, in the table, in the slots, or from the fourth slot on."""
    cache = open_cache(gpu=4, cpu=6, disk=tmp_path / "disk", retry_after=0.05)
    if segment_exists:
        serve(cache, prompt(1, seed=1))
        settle(cache)
    before = cache.stats()["disk"]["pages"]
    tokens = prompt(4, seed=2)
    with no_writes_beyond(limit):
        serve(cache, tokens)
        settle(cache)
        crowd(cache, prompts=4)
        written = cache.stats()["disk"]["pages"] - before
        assert cache.stats()["spills_dropped"] > 0
        again = cache.lease(tokens)
        assert again.matched <= written * PAGE
        assert again.wait() == again.matched
        again.release()
        settle(cache)
    cache.close()

    cache = open_cache(gpu=4, cpu=6, disk=tmp_path / "disk", retry_after=0.05)
    assert cache.stats()["disk"]["pages"] == before + written
    lease = cache.lease(tokens, leave=0)
    assert lease.wait() == lease.matched <= written * PAGE
    lease.release()
    until(lambda: rewritten(cache, tokens), "the pages to be written again")
    cache.close()
    cache = open_cache(gpu=4, cpu=6, disk=tmp_path / "disk")
    assert serve(cache, tokens).disk == 48


def rewritten(cache, tokens):
    serve(cache, tokens)
    settle(cache)
    crowd(cache, prompts=3)
    with cache.lease(tokens, leave=0) as lease:
        return lease.wait() == 64


def test_one_failed_write_among_good_ones():
    hand = ByHand(gpu_rows=4, cpu_rows=8, disk=True, retry_after=5.0)
    tokens = prompt(4, seed=3)
    hand.release(hand.publish(tokens))
    hand.finish_copies()
    hand.finish_ops(kind="grow")
    assert [op[1] for op in hand.ops] == ["write"] * 4
    bad = hand.ops[1][2]
    hand.finish_ops(lambda kind, slot: "failed" if slot == bad else "ok")
    assert hand.where(tokens) == [(2, 2, 2), (2, 2, 0), (2, 2, 2), (2, 2, 2)]
    for seed in range(10, 16):  # others push it out of both memories; writing is paused meanwhile
        hand.release(hand.publish(prompt(4, seed)))
        hand.finish_copies()
    assert not hand.ops
    lease = hand.lease(tokens, leave=0)
    assert hand.hit(lease) == 1, "what lies behind the page that is not there cannot be used"
    hand.finish_all()
    assert hand.hit(lease) == 1
    hand.driver.publish(0.0, lease, len(tokens))
    hand.release(lease)
    hand.finish_all()
    assert hand.where(tokens)[1][2] == 0
    assert hand.stats()["disk"]["failures"] == 1


def test_a_failed_copy_into_ram_is_no_copy(open_cache):
    device = GatedDevice()
    cache = open_cache(gpu=4, cpu=8, device=device)
    tokens = prompt(4, seed=4)
    device.fail_downs = True
    serve(cache, tokens)
    settle(cache)
    assert cache.stats()["cpu"]["pages"] == 0
    assert cache.stats()["copy_failures"] == 1
    assert serve(cache, tokens).gpu == 48
    settle(cache)  # what is used again is tried again
    crowd(cache)
    with cache.lease(tokens) as lease:
        assert lease.matched == lease.wait() == 0
    device.fail_downs = False
    serve(cache, tokens)
    settle(cache)
    crowd(cache)
    assert serve(cache, tokens).cpu == 48


def test_a_failed_copy_to_the_device_is_no_hit(open_cache):
    device = GatedDevice()
    cache = open_cache(gpu=4, cpu=8, device=device)
    tokens = prompt(4, seed=4)
    serve(cache, tokens)
    settle(cache)
    crowd(cache)
    device.fail_ups = True
    assert serve(cache, tokens).hit == 0  # computed again, in the rows that had been taken for the copies
    device.fail_ups = False
    settle(cache)
    crowd(cache)
    assert serve(cache, tokens).cpu == 48


@pytest.mark.guards
def test_what_keeps_it_from_happening():
    """Without one line a failed write would count as done, and the tests above see it."""
    assert_needed("failed_write", __file__, "test_the_disk_refuses_pages")
