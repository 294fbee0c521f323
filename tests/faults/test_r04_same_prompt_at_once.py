"""R4: the same prompt again, before the first one's pages are saved: what reaches RAM and disk is what was computed."""

import pytest
from support import GatedDevice, begin, crowd, finish, prompt, serve, settle, until
from unguarded import assert_needed

from kvstrata.cache import CacheFull


@pytest.mark.parametrize("repeats", [1, 3])
def test_asked_again_while_the_save_is_under_way(open_cache, tmp_path, repeats):
    device = GatedDevice()
    cache = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk", device=device)
    tokens = prompt(6, seed=4)
    device.downs.clear()
    assert serve(cache, tokens).hit == 0
    for _ in range(repeats):
        assert serve(cache, tokens).gpu == 80
    assert cache.stats()["cpu"]["pages"] == 0
    device.downs.set()
    settle(cache)
    assert cache.stats()["disk_writes"] == cache.stats()["downs"] == 6
    crowd(cache)
    assert serve(cache, tokens).cpu == 80
    cache.close()
    cache = open_cache(gpu=8, cpu=8, disk=tmp_path / "disk")
    assert serve(cache, tokens).disk == 80


def test_others_need_the_rows_while_the_save_is_under_way(open_cache):
    """Pages that are being copied are nobody's to overwrite, though no request uses them and they are the oldest."""
    device = GatedDevice()
    cache = open_cache(gpu=9, cpu=6, device=device)
    tokens = prompt(6, seed=4)
    device.downs.clear()
    serve(cache, tokens)
    until(lambda: device.started, "the save to begin")
    for seed in range(20):  # they are not saved, since RAM has no more rows: three evictable pages beside six that are held
        serve(cache, prompt(3, 100 + seed))
    assert isinstance(cache.lease(prompt(4, 200)), CacheFull)
    device.downs.set()
    settle(cache)
    with begin(cache, tokens, leave=0) as lease:
        assert lease.hit == 96
    cache.lease(prompt(9, 300), read=False, write=False, must=True).release()  # empties the device
    assert serve(cache, tokens).cpu == 48  # three went for the last prompt


def test_a_longer_prompt_while_the_save_is_under_way(open_cache, tmp_path):
    device = GatedDevice()
    cache = open_cache(gpu=12, cpu=24, disk=tmp_path / "disk", device=device)
    tokens = prompt(9, seed=5)
    device.downs.clear()
    serve(cache, tokens[:64])
    second = begin(cache, tokens)
    assert second.hit == 64
    device.downs.set()
    finish(cache, second, tokens)
    settle(cache)
    assert cache.stats()["disk_writes"] == 9
    cache.close()
    cache = open_cache(gpu=12, cpu=12, disk=tmp_path / "disk")
    assert serve(cache, tokens).disk == 128


@pytest.mark.guards
def test_what_keeps_it_from_happening():
    """Without one line rows would be overwritten while they are being saved, and the tests above see it."""
    assert_needed("copy_holds", __file__, "test_others_need_the_rows_while_the_save_is_under_way")
