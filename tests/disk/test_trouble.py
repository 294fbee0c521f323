"""A disk that is full, fails, vanishes or forbids, in earnest: requests are served, rightly, and writing resumes by itself."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from file_systems import MIB, abort, bad_sectors, ext4, fill_up, ramfs, read_only, tmpfs
from support import PAGE, crowd, prompt, serve, settle, tiny_identity, tiny_layout, until
from tool_kit import kvstrata, segments

from kvstrata.cache import Limits, PrefixCache

RETRY = 0.05


@pytest.fixture
def small(open_cache):
    """small(root, ...): a cache whose prompts are pushed out to disk by a few others."""

    def open_small(root, disk_bytes=4 << 20, **options):
        return open_cache(gpu=8, cpu=10, disk=root, disk_bytes=disk_bytes, retry_after=RETRY, **options)

    return open_small


def written(cache) -> int:
    return cache.stats()["disk_writes"]


def health(cache) -> str:
    return cache.stats()["disk"]["health"]


def work(cache, seeds, pages=6):
    """New prompts one after the other, each right in every byte."""
    for seed in seeds:
        serve(cache, prompt(pages, seed))
        settle(cache)


def resumes(cache, seed=900):
    """Pages reach the disk again, without a restart, and are read back from there."""
    before = written(cache)
    seeds = iter(range(seed, 1 << 30))

    def tried():
        work(cache, [next(seeds)])
        return written(cache) > before

    until(tried, "writing to resume")
    tokens = prompt(6, seed=seed - 1)
    until(lambda: kept(cache, tokens), "a prompt to be served from disk")
    assert health(cache) == "ok"


def kept(cache, tokens):
    serve(cache, tokens)
    settle(cache)
    crowd(cache, 4)
    found = serve(cache, tokens).disk == 5 * PAGE
    settle(cache)
    return found


def reads_from_disk(cache, tokens, pages=5):
    crowd(cache, 4, seed=int(np.sum(tokens)))
    assert serve(cache, tokens).disk == pages * PAGE
    settle(cache)


def test_a_file_system_without_room(small, tmp_path):
    """B8's: the limit allows far more than there is. What is there is read all the while, and overwritten where it helps."""
    with tmpfs(tmp_path / "full", 64 * MIB) as root:
        cache = small(root / "cache", disk_bytes=1 << 30)
        first = prompt(6, seed=1)
        serve(cache, first)
        settle(cache)
        filler = fill_up(root)
        have = cache.stats()["disk_bytes"]
        before = written(cache)
        for seed in range(10, 22):
            work(cache, [seed])
        assert cache.stats()["disk_bytes"] == have, "there was no room to grow"
        assert written(cache) > before, "what nobody used made way"
        filler.unlink()
        grown = iter(range(100, 100000))
        until(lambda: work(cache, [next(grown)]) or cache.stats()["disk_bytes"] > have, "the tier to grow again")
        resumes(cache)
        cache.close()
        assert kvstrata("verify", root / "cache", "--json").json["left"] == 0


def test_a_file_system_that_is_full_from_the_start(small, tmp_path):
    with tmpfs(tmp_path / "full", 64 * MIB) as root:
        (root / "cache").mkdir(mode=0o700)
        cache = small(root / "cache", disk_bytes=1 << 30)
        filler = fill_up(root)
        work(cache, range(10, 22))
        assert written(cache) == 0
        assert cache.stats()["spills_dropped"] > 0
        assert health(cache) == "no new pages: No space left on device"
        filler.unlink()
        resumes(cache)
        cache.close()


def test_room_that_was_promised_is_not_there(small, tmp_path):
    """Segments with holes, as a file system leaves them that only pretends to preallocate: ENOSPC comes in the middle of a slot."""
    with tmpfs(tmp_path / "full", 64 * MIB) as root:
        cache = small(root / "cache", disk_bytes=1 << 30)
        first = prompt(6, seed=1)
        serve(cache, first)
        settle(cache)
        cache.close()
        for path in segments(root / "cache"):
            data = path.read_bytes()
            with path.open("r+b") as file:  # the same bytes, but what is zero takes no blocks
                file.truncate(0)
                file.truncate(len(data))
                for at in range(0, len(data), 4096):
                    if any(data[at : at + 4096]):
                        os.pwrite(file.fileno(), data[at : at + 4096], at)
        cache = small(root / "cache", disk_bytes=1 << 30)
        filler = fill_up(root)
        work(cache, range(10, 22))
        assert cache.stats()["disk"]["failures"] > 0, "writes were tried and refused"
        assert cache.stats()["spills_dropped"] > 0
        assert "No space left on device" in health(cache)
        reads_from_disk(cache, first)
        filler.unlink()
        resumes(cache)
        cache.close()
        assert kvstrata("verify", root / "cache", "--json").json["left"] == 0


def test_a_file_system_that_turns_read_only(small, open_cache, tmp_path):
    """What the kernel does when a disk fails under ext4. Everything that is there goes on being read."""
    with ext4(tmp_path / "failing", 64 * MIB) as root:
        cache = small(root / "cache", disk_bytes=32 * MIB)
        first = prompt(6, seed=1)
        serve(cache, first)
        settle(cache)
        abort(root)
        before = written(cache)
        work(cache, range(10, 22))
        assert written(cache) == before
        assert cache.stats()["spills_dropped"] > 0
        assert cache.stats()["disk"]["failures"] > 0
        assert "Read-only file system" in health(cache)
        reads_from_disk(cache, first)
        cache.close()
        with pytest.raises(RuntimeError, match=r"disk_path .*Read-only file system; mount the file system for writing"):
            small(root / "cache", disk_bytes=32 * MIB)


def test_sectors_that_cannot_be_read(small, tmp_path):
    """EIO: the pages are missing for a while, nothing is dropped, and they are read again when the disk is well."""
    with ext4(tmp_path / "failing", 64 * MIB) as root:
        cache = small(root / "cache", disk_bytes=16 * MIB)
        prompts = [prompt(6, seed) for seed in range(1, 9)]
        for tokens in prompts:
            serve(cache, tokens)
            settle(cache)
        crowd(cache, 4)
        pages = cache.stats()["disk"]["pages"]
        with bad_sectors(root, segments(root / "cache")):
            for tokens in prompts:
                assert serve(cache, tokens).disk == 0
                settle(cache)
            assert health(cache) == "pages are not read: Input/output error"
            assert cache.stats()["unreadable"] > 0
            assert cache.stats()["corrupt"] == 0
            assert cache.stats()["disk"]["pages"] == pages
        crowd(cache, 4)
        assert cache.stats()["disk"]["pages"] >= pages
        until(lambda: serve(cache, prompts[0]).disk == 5 * PAGE or settle(cache) or crowd(cache, 4), "reads to resume")
        settle(cache)
        crowd(cache, 4)
        assert all(serve(cache, tokens).disk == 5 * PAGE and cache.flush(30) for tokens in prompts[1:])
        assert health(cache) == "ok"
        cache.close()
        assert kvstrata("verify", root / "cache", "--json").json["left"] == 0


def test_a_read_only_file_system(small, tmp_path):
    """Refused at the start in one sentence, looked at by the tools all the same, as good as before afterwards."""
    with tmpfs(tmp_path / "fixed", 64 * MIB) as root:
        layout, first = tiny_layout(), prompt(6, seed=1)
        with PrefixCache(layout, Limits(8, 10, str(root / "cache"), 4 * MIB), identity=tiny_identity(layout)) as cache:
            serve(cache, first)
            settle(cache)
        del cache  # its lock file goes with it
        with read_only(root):
            with pytest.raises(RuntimeError, match=r"disk_path .*Read-only file system; mount the file system for writing"):
                small(root / "cache")
            assert kvstrata("inspect", root / "cache").status == 0
            assert kvstrata("verify", root / "cache", "--json").json["sound"] == 6
        assert serve(small(root / "cache"), first).disk == 5 * PAGE


@contextmanager
def unprivileged():
    """Root may do anything, so root becomes somebody else for a while; all threads of the process do. Yields a directory of his."""
    user = os.geteuid()
    folder = Path(tempfile.mkdtemp(prefix="kvstrata-test-"))
    try:
        if user == 0:
            os.chown(folder, 65534, 65534)
            os.seteuid(65534)
        yield folder
    finally:
        os.seteuid(user)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o700)
        shutil.rmtree(folder)


def test_a_read_only_directory(small):
    """Nothing new can be made; segments that are there are written and read."""
    with unprivileged() as root:
        cache = small(root / "cache")
        first = prompt(6, seed=1)
        serve(cache, first)
        settle(cache)
        have = cache.stats()["disk_bytes"]
        (shelf,) = (root / "cache" / "shelves").iterdir()
        shelf.chmod(0o500)
        work(cache, range(10, 22))
        assert cache.stats()["disk_bytes"] == have
        shelf.chmod(0o700)
        resumes(cache)
        assert cache.stats()["disk_bytes"] > have
        cache.close()
        (root / "cache").chmod(0o500)
        with pytest.raises(RuntimeError, match=r"disk_path .*Permission denied; give this user read and write permission"):
            small(root / "cache")
        (root / "cache").chmod(0o700)


def test_permission_lost(small):
    """Files that may not be opened any more; those that are open stay so."""
    with unprivileged() as root:
        cache = small(root / "cache")
        first = prompt(6, seed=1)
        serve(cache, first)
        settle(cache)
        (root / "cache" / "shelves").chmod(0)
        work(cache, range(10, 30))
        assert cache.stats()["corrupt"] == 0
        (root / "cache" / "shelves").chmod(0o700)
        resumes(cache)
        cache.close()
        for path in segments(root / "cache"):  # of a cache that is opened now: nothing can be read, everything is kept
            path.chmod(0)
        cache = small(root / "cache")
        assert serve(cache, first).hit == 0
        settle(cache)
        resumes(cache)
        cache.close()
        for path in segments(root / "cache"):
            path.chmod(0o600)
        assert kvstrata("verify", root / "cache", "--json").json["left"] == 0


def test_without_direct_io(small, tmp_path):
    """B14's, on a file system that has neither O_DIRECT nor preallocation."""
    with ramfs(tmp_path / "plain") as root:
        cache = small(root / "cache")
        first = prompt(6, seed=1)
        serve(cache, first)
        settle(cache)
        work(cache, range(10, 22))
        reads_from_disk(cache, first)
        assert cache.stats()["disk"]["direct"] is False
        assert health(cache) == "ok"
        cache.close()
        assert all(path.stat().st_blocks * 512 >= path.stat().st_size for path in segments(root / "cache"))
        cache = small(root / "cache")
        assert serve(cache, first).disk == 5 * PAGE
        cache.close()
        assert kvstrata("verify", root / "cache", "--json").json["left"] == 0


@pytest.mark.parametrize("what", ["the directory's content", "the directory"])
def test_removed_under_a_living_cache(small, tmp_path, what):
    root = tmp_path / "disk"
    cache = small(root)
    work(cache, range(1, 5))
    if what == "the directory":
        shutil.rmtree(root)
    else:
        for path in root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    work(cache, range(10, 30))
    assert cache.stats()["corrupt"] == 0
    seeds = iter(range(100, 1 << 30))
    until(lambda: work(cache, [next(seeds)]) or segments(root), "segments to be made again")
    resumes(cache)
    tokens = prompt(6, seed=5000)
    serve(cache, tokens)
    cache.close()
    assert serve(small(root), tokens).disk == 5 * PAGE
