"""B11: a disk_path that cannot be used: ready, or one sentence that names path and cause, and never a hang."""

import time

import pytest
from file_systems import MIB, fill_up, read_only, tmpfs
from support import prompt, serve, settle, tiny_identity, tiny_layout

from kvstrata.cache import Limits, PrefixCache
from kvstrata.config import ConfigError, Settings

SECONDS = 5.0  # two on a machine that has nothing else to do


def limits(root, **options):
    return Limits(4, 8, str(root), 1 << 20, **options)


def opened(limits):
    started = time.monotonic()
    try:
        return PrefixCache(tiny_layout(), limits, identity=tiny_identity(tiny_layout()))
    finally:
        assert time.monotonic() - started < SECONDS


def refused(limits, *words):
    with pytest.raises((ValueError, RuntimeError)) as error:
        opened(limits)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


def works(cache, pages):
    serve(cache, prompt(3))
    settle(cache)
    assert cache.stats()["disk"]["pages"] == pages
    assert cache.close()


def test_missing_parents(tmp_path):
    works(opened(limits(tmp_path / "some/where/new")), 3)


def test_not_set(tmp_path):
    works(opened(Limits(4, 8)), 0)


def test_a_file(tmp_path):
    (tmp_path / "file").touch()
    refused(limits(tmp_path / "file"), f"disk_path {tmp_path}/file", "a file stands where a directory is needed")
    refused(limits(tmp_path / "file/below"), f"disk_path {tmp_path}/file/below", "a file stands where a directory is needed")


def test_read_only(tmp_path):
    with tmpfs(tmp_path / "fs", 4 * MIB) as root, read_only(root):
        refused(limits(root / "cache"), f"disk_path {root}/cache", "Read-only file system", "mount the file system for writing")


def test_no_space(tmp_path):
    with tmpfs(tmp_path / "fs", 4 * MIB) as root:
        (root / "cache").mkdir(0o700)
        fill_up(root)
        refused(limits(root / "cache"), f"disk_path {root}/cache", "No space left on device", "free some space")


def test_settings_of_another_version(tmp_path):
    """Keys that are missing take defaults; one that is not known any more is named, with the file it is in."""
    file = tmp_path / "config.yaml"
    file.write_text("kvc2:\n  disk_path: cache\n")
    settings = Settings.load(file)
    assert settings.kvc2.io_threads == 4
    file.write_text("kvc2:\n  disk_path: cache\n  disk_limit: 7\n")
    with pytest.raises(ConfigError) as error:
        Settings.load(file)
    assert "disk_limit" in str(error.value)
    assert str(file) in str(error.value)
