"""R11: with the GPU tier alone, saving is nothing to do: no crash, and nothing is waited for."""

import pytest
from support import PAGE, begin, fill, prompt, serve, settle
from unguarded import assert_needed


def test_publishing_saves_nothing(open_cache):
    cache = open_cache(gpu=8, cpu=0)
    tokens = prompt(6, seed=1)
    for _ in range(3):
        serve(cache, tokens)
        assert cache.flush(5), "nothing is under way"
    assert serve(cache, tokens).gpu == 80
    stats = cache.stats()
    assert stats["gpu"]["pages"] == 6
    assert stats["saves_dropped"] == stats["downs"] == stats["ups"] == 0


def test_all_that_touches_lower_tiers(open_cache):
    cache = open_cache(gpu=8, cpu=0)
    tokens = prompt(6, seed=1)
    with begin(cache, tokens[:40]) as lease:
        fill(cache, lease.rows, tokens, 0, 2)
        lease.publish(2 * PAGE, ready=cache.pool.mark_batch())
        lease.append(tokens[40:48])
        assert lease.grow(48)
    for seed in range(5):  # evicts
        serve(cache, prompt(8, seed=10 + seed))
    assert cache.stats()["gpu"]["evicted"] > 0
    assert serve(cache, tokens).hit == 0
    assert cache.explain(tokens)
    assert cache.purge(everything=True)["done"]
    settle(cache)
    assert cache.stats()["gpu"]["pages"] == 0
    assert cache.close(5)


@pytest.mark.guards
def test_what_keeps_it_from_happening():
    """Without one line saves would wait for rows of a tier that is not there, and the tests above see it."""
    assert_needed("no_cpu_tier", __file__, "test_publishing_saves_nothing")
