"""A cache that cannot be made says so in one sentence, at once, and leaves nothing behind."""

import fcntl
import os
import threading
import time
from contextlib import suppress

import pytest
from support import prompt, serve, settle, tiny_identity, tiny_layout

from kvstrata.cache import Limits, PrefixCache
from kvstrata.layout import PageLayout, PlaneSpec
from kvstrata.machine import memory

pytest.importorskip("torch")  # and imported: that alone may take seconds
LAYOUT = tiny_layout()


def refused(limits, *, words, layout=LAYOUT, seconds=2.0, **options):
    """The sentence, which must hold all of `words`."""
    before = {thread.name for thread in threading.enumerate()}
    started = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as error:
        PrefixCache(layout, limits, identity=tiny_identity(layout), **options)
    assert time.monotonic() - started < seconds
    sentence = str(error.value)
    assert "\n" not in sentence
    assert 20 < len(sentence) < 300
    for word in words:
        assert word in sentence, sentence
    assert {thread.name for thread in threading.enumerate()} <= before
    return sentence


@pytest.mark.parametrize("page_size", [100, 0, -16, 8, 2048, 16.0, "16", None, True])
def test_page_sizes(page_size):
    with pytest.raises(ValueError) as error:
        PageLayout.from_planes([PlaneSpec(0, "k", "float32", (1, 8))], page_size=page_size, dtype="float32", tag="t")
    assert f"page_size {page_size!r} must be a power of two from 16 to 1024" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("chunk", [24, 17, 100])
def test_chunk_and_page_size(chunk):
    refused(Limits(4), chunk=chunk, words=[f"chunk_size {chunk}", "page_size 16", "must divide"])


def test_disk_without_ram(tmp_path):
    refused(Limits(4, 0, str(tmp_path), 1 << 20), words=["CPU tier", "kvc2.cpu_memory_size_GB"])
    assert not list(tmp_path.iterdir())


def test_disk_path_is_a_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("precious")
    refused(Limits(4, 4, str(file), 1 << 20), words=[str(file), "directory"])
    assert file.read_text() == "precious"


def test_disk_path_below_a_file(tmp_path):
    file = tmp_path / "file"
    file.touch()
    refused(Limits(4, 4, f"{file}/cache", 1 << 20), words=[f"{file}/cache", "a file stands where a directory is needed"])


def test_disk_path_is_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refused(Limits(4, 4, str(tmp_path / "pipe"), 1 << 20), words=[str(tmp_path / "pipe"), "directory"])


def test_a_pipe_where_the_lock_belongs(tmp_path):
    """Opening a pipe may hang for ever; ours does not."""
    root = tmp_path / "cache"
    root.mkdir(mode=0o700)
    os.mkfifo(root / "lock")
    refused(Limits(4, 4, str(root), 1 << 20), words=[str(root)])


def test_disk_path_in_a_place_that_takes_no_files():
    refused(Limits(4, 4, "/proc/kvstrata", 1 << 20), words=["/proc/kvstrata", "cannot be made"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_disk_path_is_read_only(tmp_path):
    root = tmp_path / "cache"
    root.mkdir(mode=0o500)
    refused(Limits(4, 4, str(root), 1 << 20), words=[str(root), "read and write permission"])
    root.chmod(0o500)
    refused(Limits(4, 4, str(root / "below"), 1 << 20), words=[str(root / "below"), "permission"])


def test_disk_path_that_others_may_write(tmp_path):
    root = tmp_path / "cache"
    root.mkdir()
    (root / "something").touch()
    root.chmod(0o777)
    refused(Limits(4, 4, str(root), 1 << 20), words=[str(root), "other users", "chmod 700"])


def test_too_little_disk(tmp_path):
    refused(Limits(4, 4, str(tmp_path / "cache"), 8192), words=["8192 bytes", "four pages", "disk_size_GB"])


def test_more_ram_than_exists():
    refused(Limits(4, (1 << 31) - 2), words=["this machine", "lower cpu_memory_size_GB"])


@pytest.mark.parametrize("pages", [(1 << 31) - 2, memory().total // LAYOUT.row_stride + 1])
def test_a_pool_larger_than_memory(pages):
    refused(Limits(pages, 4), words=["page pool", "memory", "lower kvc2.gpu_memory_size_GB"])


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "meta", "tpu"])
def test_devices_that_are_not_there(device):
    torch = pytest.importorskip("torch")
    if device.startswith("cuda") and torch.cuda.is_available() and torch.cuda.device_count() > 7:
        pytest.skip("this machine has that many GPUs")
    refused(Limits(4), device=device, words=[device.split(":")[0]])


def test_another_process_holds_the_lock(tmp_path):
    """Somebody who took the directory's lock and hangs: told after a while, not waited for."""
    root = tmp_path / "cache"
    root.mkdir(mode=0o700)
    with (root / "lock").open("w") as lock:
        os.chmod(root / "lock", 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(Limits(4, 4, str(root), 1 << 20), words=[str(root), "another process has held its lock"], seconds=4.0)


def test_a_good_cache_after_each_bad_one(open_cache, tmp_path):
    """Whatever was refused, the same directory works once the reason is gone."""
    root = tmp_path / "cache"
    root.touch()
    refused(Limits(4, 4, str(root), 1 << 20), words=[str(root)])
    root.unlink()
    refused(Limits(4, 4, str(root), 100), words=["100 bytes"])
    with suppress(FileNotFoundError):
        assert not list(root.rglob("*.kvs"))
    cache = open_cache(gpu=4, cpu=4, disk=root)
    serve(cache, prompt(3))
    settle(cache)
    assert cache.stats()["disk"]["pages"] == 3
