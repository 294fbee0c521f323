"""Purges that are killed, closed over, or kept waiting; owners that are stopped, busy, or still rebuilding."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PAGE, GatedDevice, prompt, serve, settle, until
from tool_kit import fill_disk, segments, traces

from kvstrata._core import purge

OWNER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from support import prompt, serve, settle, tiny_identity, tiny_layout
from kvstrata.cache import Limits, PrefixCache
layout = tiny_layout()
cache = PrefixCache(layout, Limits(8, 16, sys.argv[2], 16 << 20), identity=tiny_identity(layout))
serve(cache, prompt(4))
settle(cache)
print("ready", flush=True)
if sys.argv[3] == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Another process with four pages: "live", or "stop"ped."""
    made = []

    def start(how: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", OWNER, str(Path(__file__).parents[1]), str(tmp_path / "disk"), how]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        made.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if how == "stop":
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        return process

    yield start
    for process in made:
        process.kill()
        process.wait()


def test_what_a_killed_purge_asked_is_never_carried_out(open_cache: Any, owner: Any, tmp_path: Path) -> None:
    root = tmp_path / "disk"
    stuck = owner("stop")
    tool = subprocess.Popen([sys.executable, "-m", "kvstrata", "purge", str(root), "--all", "--yes"])
    until(lambda: (root / "requests").exists() and (root / "requests").stat().st_size > 0, "it asks")
    tool.send_signal(signal.SIGKILL)
    tool.wait()
    stuck.kill()
    stuck.wait()
    assert (root / "requests").stat().st_size > 0  # nobody took it back
    caches = [open_cache(gpu=24, cpu=40, disk=root) for _ in range(2)]
    prompts = [fill_disk(cache, 6, seed=seed) for seed, cache in enumerate(caches)]
    for _ in range(100):
        purge(str(root), to_bytes=1 << 40)  # drops nothing
    assert (root / "requests").stat().st_size == 0
    assert [traces(root, tokens) for tokens in prompts] == [6, 6]


def test_who_is_never_idle_reaches_the_others_all_the_same(open_cache: Any, owner: Any, tmp_path: Path) -> None:
    root = tmp_path / "disk"
    busy = open_cache(gpu=0, cpu=64, disk=root, disk_bytes=16 << 20)
    owner("live")
    with busy.lease(prompt(4, seed=77)) as lease:
        ticket = lease.save(0, np.arange(4, dtype=np.int32), 0)  # an engine whose copy takes its time
        report = busy.purge(everything=True, timeout=20.0)  # while the other looks and answers
        assert traces(root, prompt(4)) == 0
        busy.take_copies()
        busy.copied(ticket, True)
    assert (report["pages"], report["done"]) == (4, False)


def test_pages_that_are_still_to_be_rebuilt_go_too(open_cache: Any, tmp_path: Path) -> None:
    root = tmp_path / "disk"
    options = {"gpu": 300, "cpu": 600, "disk": root, "disk_bytes": 64 << 20}
    first = open_cache(**options)
    prompts = [fill_disk(first, 280, seed=seed) for seed in range(8)]
    first.close()
    for path in segments(root):
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(bytes(8192))  # some blocks of the table
    cache = open_cache(**options)
    report = cache.purge(everything=True)
    until(lambda: cache.stats()["disk"]["unproven_slots"] == 0, "rebuilt")
    settle(cache)
    assert cache.stats()["disk"]["pages"] <= report["used_pages"]
    assert sum(traces(root, tokens) for tokens in prompts) <= report["used_pages"]


def test_close_ends_a_purge_that_waits(open_cache: Any, owner: Any, tmp_path: Path) -> None:
    cache = open_cache(gpu=24, cpu=40, disk=tmp_path / "disk")
    owner("stop")
    requests = tmp_path / "disk" / "requests"
    with ThreadPoolExecutor(1) as pool:
        report = pool.submit(cache.purge, everything=True, timeout=600.0)
        until(lambda: requests.exists() and requests.stat().st_size > 0, "it asks")
        cache.close()
        ended = report.result(timeout=60)
    assert (ended["cancelled"], ended["done"]) == (True, False)


def test_somebody_who_does_not_let_go_of_the_lock(open_cache: Any, tmp_path: Path) -> None:
    root = tmp_path / "disk"
    cache = open_cache(gpu=24, cpu=40, disk=root)
    tokens = fill_disk(cache, 6)
    with (root / "lock").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        report = cache.purge(tokens=tokens[: 2 * PAGE], timeout=0.1)
    assert (report["done"], report["failures"]) == (False, 1)
    assert "in use by another purge" in report["error"]
    assert cache.purge(tokens=tokens[: 2 * PAGE])["done"]
    assert traces(root, tokens) == 1


def test_a_purge_that_was_closed_over_is_not_done(open_cache: Any, tmp_path: Path) -> None:
    root = tmp_path / "disk"
    cache = open_cache(gpu=24, cpu=40, disk=root)
    tokens = fill_disk(cache, 6)
    with (root / "requests").open("w+b") as file, ThreadPoolExecutor(1) as pool:
        fcntl.flock(file, fcntl.LOCK_EX)  # another purge is under way
        report = pool.submit(cache.purge, everything=True, timeout=600.0)
        cache.close()
        fcntl.flock(file, fcntl.LOCK_UN)
        ended = report.result(timeout=60)
    assert ended["done"] == (traces(root, tokens) == 0)


@pytest.fixture
def busy(open_cache: Any, tmp_path: Path) -> Any:
    """Six pages on disk, and pages whose copies out of the pool take their time; their tokens."""
    device = GatedDevice()
    cache = open_cache(gpu=24, cpu=64, disk=tmp_path / "disk", disk_bytes=16 << 20, device=device)
    tokens = fill_disk(cache, 6)
    device.downs.clear()
    serve(cache, prompt(4, seed=77))
    yield cache, device, tokens
    device.downs.set()
    settle(cache)


def test_who_asks_others_does_its_own_part_once(busy: Any, owner: Any, tmp_path: Path) -> None:
    """Its own look at what is asked does not make it purge twice."""
    cache, _, tokens = busy
    owner("live")
    report = cache.purge(everything=True, timeout=20.0)  # as long as the other may take to look and answer
    assert traces(tmp_path / "disk", tokens) == 0
    assert report["pages"] == 4 + 6  # the other's and ours


def test_what_is_published_after_a_purge_stays(busy: Any, owner: Any, tmp_path: Path) -> None:
    cache, device, _ = busy
    other = owner("live")
    cache.purge(everything=True, timeout=0.6)
    new = prompt(6, seed=99)
    serve(cache, new)
    device.downs.set()
    settle(cache)
    other.kill()
    until(lambda: cache.stats()["disk"]["owners"] == 1, "it has looked round since")
    settle(cache)
    assert (traces(tmp_path / "disk", new), cache.explain(new)["hit"]) == (6, 5 * PAGE)


SLOW = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from support import GatedDevice, prompt, serve, settle, tiny_identity, tiny_layout
from kvstrata.cache import Limits, PrefixCache
layout = tiny_layout()
device = GatedDevice()
cache = PrefixCache(layout, Limits(8, 16, sys.argv[2], 16 << 20), identity=tiny_identity(layout), device=device)
device.downs.clear()
serve(cache, prompt(4))  # in the pool; nothing is on disk yet
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_not_done_where_an_owner_did_not_answer(open_cache: Any, tmp_path: Path) -> None:
    """It may have pages in memory that nobody else can see."""
    root = tmp_path / "disk"
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(Path(__file__).parents[1]), str(root)])
    try:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        report = open_cache(gpu=24, cpu=40, disk=root).purge(everything=True, timeout=0.5)
        assert (report["used_pages"], report["unanswered"], report["done"]) == (0, 1, False)
    finally:
        process.kill()
        process.wait()
