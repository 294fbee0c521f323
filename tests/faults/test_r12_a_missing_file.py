"""R12: with any one file of the directory missing, pages are found or computed again; none is stored twice."""

import shutil

import pytest
from support import PAGE, crowd, prompt, serve, settle
from unguarded import assert_needed


def files_of(disk):
    """Every file and folder of a directory that one process has used, by its path below it."""
    return sorted(str(path.relative_to(disk)) for path in disk.rglob("*"))


def stored(open_cache, disk, tokens):
    cache = open_cache(gpu=8, cpu=16, disk=disk)
    serve(cache, tokens)
    settle(cache)
    assert cache.stats()["disk"]["pages"] == 6
    cache.close()


def test_whatever_is_missing(open_cache, tmp_path):
    tokens = prompt(6, seed=1)
    stored(open_cache, tmp_path / "kept", tokens)
    names = files_of(tmp_path / "kept")
    assert len(names) >= 4
    for number, name in enumerate(names):
        disk = tmp_path / f"without-{number}"
        shutil.copytree(tmp_path / "kept", disk, copy_function=shutil.copy2)
        missing = disk / name
        shutil.rmtree(missing) if missing.is_dir() else missing.unlink()
        cache = open_cache(gpu=8, cpu=16, disk=disk)
        for _ in range(3):
            assert serve(cache, tokens).hit in (0, 80)
            settle(cache)
            crowd(cache)
        settle(cache)
        assert cache.purge(tokens=tokens[:PAGE])["pages"] == 6, name
        cache.close()


@pytest.mark.parametrize("rounds", [1, 4])
def test_a_page_that_comes_down_again_is_not_written_again(open_cache, tmp_path, rounds):
    tokens = prompt(6, seed=1)
    cache = open_cache(gpu=8, cpu=8, disk=tmp_path / "disk")
    for _ in range(rounds):
        serve(cache, tokens)
        settle(cache)
        crowd(cache, prompts=3)  # out of both tiers above
    written = cache.stats()["disk_writes"]
    serve(cache, tokens)
    settle(cache)
    assert cache.stats()["disk_writes"] == written


@pytest.mark.guards
def test_what_keeps_it_from_happening():
    """Without one line what the disk has would be written again, and the tests above see it."""
    assert_needed("written_once", __file__, "test_a_page_that_comes_down_again_is_not_written_again")
