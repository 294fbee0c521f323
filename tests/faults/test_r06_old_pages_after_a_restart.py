"""R6: what a process stores does not overwrite what an earlier one left, as long as there is room for both."""

import pytest
from support import prompt, serve, settle
from unguarded import assert_needed


@pytest.mark.parametrize("restarts", [1, 3])
def test_pages_of_all_processes_are_found(open_cache, tmp_path, restarts):
    old = prompt(6, seed=1)
    for number in range(restarts + 1):
        cache = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk")
        assert cache.stats()["disk"]["pages"] == 6 * number
        for seed in range(1, number + 1):
            with cache.lease(prompt(6, seed), leave=0) as lease:
                assert lease.wait() == lease.matched == 96
            settle(cache)
        serve(cache, prompt(6, seed=number + 1))
        settle(cache)
        assert cache.stats()["disk"]["evicted"] == 0
        cache.close()
    cache = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk")
    for number in range(restarts + 1):
        assert serve(cache, prompt(6, seed=number + 1)).disk == 80  # serve() proves whose bytes they are
        settle(cache)
    assert serve(cache, old).hit == 80
    stats = cache.stats()
    assert stats["corrupt"] == stats["stale"] == stats["key_conflicts"] == 0


@pytest.mark.guards
def test_what_keeps_it_from_happening():
    """Without one line the slots of found pages would be free, and the tests above see it."""
    assert_needed("found_slots", __file__, "test_pages_of_all_processes_are_found")
