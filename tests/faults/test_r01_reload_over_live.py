"""R1: a page that left the GPU and is asked for again must not land on a row that another request uses by now."""

import random

import pytest
from support import POISON, ByHand, begin, crowd, device_row, fill, finish, prompt, serve, settle, wrong
from unguarded import assert_needed

from kvstrata.cache import CacheFull


def test_old_row_of_an_evicted_page_stays_its_new_owners(open_cache):
    cache = open_cache(gpu=9, cpu=16)
    known, live = prompt(4, seed=1), prompt(6, seed=2)
    lease = begin(cache, known)
    old_rows = set(lease.rows[:4].tolist())
    finish(cache, lease, known)
    settle(cache)
    crowd(cache)
    with begin(cache, live) as running:  # six of nine rows: at least one of the evicted pages' four is among them
        fill(cache, running.rows, live, 0, 6)
        assert old_rows & set(running.rows.tolist())
        again = cache.lease(known[:48], leave=0, must=True)
        assert again.wait() == 48
        assert again.sources["cpu"] == 48
        assert not set(again.rows.tolist()) & set(running.rows.tolist())
        assert not wrong(cache, again.rows, known, 3)
        assert not wrong(cache, running.rows, live, 6)
        again.release()


@pytest.mark.parametrize("published", [True, False])
def test_only_a_live_requests_pages_could_go(open_cache, published):
    cache = open_cache(gpu=6, cpu=16)
    known, live = prompt(4, seed=1), prompt(5, seed=2)
    serve(cache, known)
    settle(cache)
    crowd(cache)
    with begin(cache, live) as running:
        fill(cache, running.rows, live, 0, 5)
        if published:
            running.publish(len(live), ready=cache.pool.mark_batch())
            settle(cache)  # also saved below: nothing but the lease keeps these pages
        full = cache.lease(known)
        assert isinstance(full, CacheFull)
        assert not full.never
        assert not wrong(cache, running.rows, live, 5)
    assert serve(cache, known).cpu == 48


def test_many_requests_share_a_small_pool(open_cache):
    cache = open_cache(gpu=12, cpu=40)
    rng = random.Random(1)
    prompts = [prompt(rng.randint(1, 5) + 0.5, seed) for seed in range(12)]
    live = []
    reloaded = 0
    for _ in range(600):
        if live and (len(live) == 3 or rng.random() < 0.5):
            lease, tokens = live.pop(rng.randrange(len(live)))
            finish(cache, lease, tokens)
        else:
            tokens = rng.choice(prompts)
            lease = cache.lease(tokens)
            if isinstance(lease, CacheFull):
                continue
            hit = lease.wait() // cache.page_size
            reloaded += lease.sources["cpu"]
            assert not wrong(cache, lease.rows, tokens, hit)
            for row in lease.rows[hit:]:
                device_row(cache, row)[:] = POISON
            live.append((lease, tokens))
        for lease, tokens in live:
            assert not wrong(cache, lease.rows, tokens, lease.hit // cache.page_size)
    assert reloaded > 100 * cache.page_size
    for lease, tokens in live:
        finish(cache, lease, tokens)


def test_a_reload_waits_for_the_last_batch_that_may_read_the_row():
    hand = ByHand(gpu_rows=2, cpu_rows=8)
    first, second = prompt(2, seed=1), prompt(2, seed=2)
    for tokens, fence in ((first, 4), (second, 7)):
        hand.release(hand.publish(tokens, ready=fence - 1), fence)
        hand.finish_copies()
    hand.lease(first, leave=0)  # both rows change hands
    ((_, up, _, _, fence),) = hand.copies
    assert up
    assert fence == 7


@pytest.mark.guards
def test_what_keeps_it_from_happening():
    """Without one line what a request uses could be evicted, and the tests above see it."""
    assert_needed("pins", __file__, "test_many_requests_share_a_small_pool")
