"""Purging beside processes that live: they are asked, drop what they own, and say what they had to keep."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support import PAGE, begin, disk_usage, finish, prompt, serve, settle, until
from tool_kit import fill_disk, kvstrata, traces

from kvstrata._core import purge


@pytest.fixture
def pair(open_cache, tmp_path):
    """Two owners of one directory, each with pages of its own; their prompts."""
    root = tmp_path / "disk"
    caches = [open_cache(gpu=24, cpu=40, disk=root) for _ in range(2)]
    return root, caches, [fill_disk(cache, 6, seed=seed) for seed, cache in enumerate(caches)]


def test_everything(pair):
    root, caches, prompts = pair
    ended = kvstrata("purge", root, "--all", "--yes", "--json")
    assert ended.status == 0
    assert (ended.json["pages"], ended.json["used_pages"], ended.json["used_shelves"], ended.json["done"]) == (12, 0, 0, True)
    for cache, tokens in zip(caches, prompts, strict=True):
        assert traces(root, tokens) == 0
        assert serve(cache, tokens).hit == 0  # nor in its memory
        cache.check_integrity()
    for cache in caches:
        settle(cache)
    assert kvstrata("verify", root).status == 0


def test_from_one_of_them(pair):
    root, (one, other), prompts = pair
    report = one.purge(everything=True)
    assert report["done"]
    assert report["pages"] == 12
    assert [traces(root, tokens) for tokens in prompts] == [0, 0]
    assert serve(other, prompts[1]).hit == 0


def test_what_is_in_use_is_told_and_goes_the_next_time(pair):
    root, caches, prompts = pair
    lease = begin(caches[1], prompts[1])
    ended = kvstrata("purge", root, "--all", "--yes", "--json")
    assert ended.status == 1
    assert (ended.json["pages"], ended.json["used_pages"], ended.json["used_shelves"]) == (12, 5, 1)
    finish(caches[1], lease, prompts[1])  # proven
    settle(caches[1])
    assert kvstrata("purge", root, "--all", "--yes").status == 0
    assert [traces(root, tokens) for tokens in prompts] == [0, 0]


def test_one_namespace(pair):
    root, caches, prompts = pair
    private = fill_disk(caches[1], 4, seed=7, tenant="acme")
    name = caches[0].namespace(tenant="acme").hex()
    assert kvstrata("purge", root, "--namespace", name, "--yes", "--json").json["pages"] == 4
    assert traces(root, private) == 0
    assert [serve(cache, tokens).hit for cache, tokens in zip(caches, prompts, strict=True)] == [5 * PAGE, 5 * PAGE]
    assert serve(caches[1], private, tenant="acme").hit == 0


def test_a_prefix_that_others_continued(pair, tmp_path):
    root, (one, other), prompts = pair
    longer = np.concatenate([prompts[0], prompt(3, seed=8)])
    serve(other, longer)
    settle(other)
    file = tmp_path / "tokens"
    file.write_text(json.dumps(prompts[0][: 4 * PAGE].tolist()))
    ended = kvstrata("purge", root, "--prefix", file, "--yes", "--json")
    assert ended.json["done"]
    assert traces(root, longer) == 3
    assert serve(one, prompts[0]).hit == 3 * PAGE
    assert serve(other, longer).hit == 3 * PAGE


@pytest.mark.parametrize("who", ["tool", "first", "second"])
def test_a_prefix_whose_middle_another_owns(pair, tmp_path, who):
    """What was dropped first, took the link to the rest with it."""
    root, (one, other), prompts = pair
    until(lambda: other.stats()["disk"]["shared"] >= 6, "the other's pages are known")
    longer = np.concatenate([prompts[0], prompt(3, seed=8)])
    serve(other, longer)
    settle(other)
    prefix = prompts[0][: 4 * PAGE]
    if who == "tool":
        file = tmp_path / "tokens"
        file.write_text(json.dumps(prefix.tolist()))
        assert kvstrata("purge", root, "--prefix", file, "--yes", "--json").json["done"]
    else:
        assert (one if who == "first" else other).purge(tokens=prefix)["done"]
    assert traces(root, longer) == 3


def test_to_a_size(pair):
    root, caches, _ = pair
    for number, cache in enumerate(caches):
        for seed in range(8):
            fill_disk(cache, 8, seed=20 + 10 * number + seed)
    before = disk_usage(root)
    ended = kvstrata("purge", root, "--to-size", f"{before // 2}B", "--yes", "--json")
    assert (ended.status, ended.json["done"]) == (0, True)
    assert ended.json["pages"] > 0
    assert disk_usage(root) <= before // 2
    assert all(cache.stats()["disk"]["pages"] > 0 for cache in caches)  # both gave
    for cache in caches:
        cache.check_integrity()
        serve(cache, prompt(4, seed=99))


def test_a_request_is_not_for_those_who_come_later(open_cache, tmp_path):
    """One that was left behind, by somebody who was killed while he waited."""
    root = tmp_path / "disk"
    first = open_cache(gpu=8, cpu=16, disk=root)
    kept = []
    stop = str(root / "requests")

    def keep():  # what the tool writes, before it takes it back
        kept.append(Path(stop).read_bytes())
        return True

    tokens = fill_disk(first, 4)
    purge(str(root), all=True, progress=lambda done, total: keep())
    left = next(one for one in kept if one)
    serve(first, tokens)
    settle(first)
    first.close()
    Path(stop).write_bytes(left)
    second = open_cache(gpu=8, cpu=16, disk=root)
    assert serve(second, tokens).disk == 3 * PAGE
    third = open_cache(gpu=8, cpu=16, disk=root)  # the list of shelves changes: all look again
    serve(third, prompt(2, seed=5))
    settle(third)
    assert traces(root, tokens) == 4


@pytest.mark.parametrize("content", [b"", b"junk", b"KVSPURGE" + bytes(8192), b"KVSPURGE\1\0\0\0" + b"\xff" * 4096])
def test_a_request_that_is_none(pair, content):
    root, caches, prompts = pair
    (root / "requests").write_bytes(content)
    os.chmod(root / "requests", 0o600)
    assert serve(caches[0], prompts[0]).hit == 5 * PAGE
    assert kvstrata("purge", root, "--all", "--yes").status == 0
    assert [traces(root, tokens) for tokens in prompts] == [0, 0]


STOPPED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from support import prompt, serve, settle, tiny_identity, tiny_layout
from kvstrata.cache import Limits, PrefixCache
layout = tiny_layout()
cache = PrefixCache(layout, Limits(8, 16, sys.argv[2], 4 << 20), identity=tiny_identity(layout))
serve(cache, prompt(4))
settle(cache)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_an_owner_that_does_not_answer(tmp_path):
    """It is waited for a while, and what it keeps is counted."""
    root = tmp_path / "disk"
    process = subprocess.Popen([sys.executable, "-c", STOPPED, str(Path(__file__).parents[1]), str(root)])
    try:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        ended = kvstrata("purge", root, "--all", "--yes", "--json")
        assert ended.status == 1
        assert (ended.json["pages"], ended.json["used_pages"], ended.json["used_shelves"]) == (0, 4, 1)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert kvstrata("purge", root, "--all", "--yes").status == 0
    assert traces(root, prompt(4)) == 0


def test_an_owner_that_dies_meanwhile(open_cache, tmp_path):
    """Whoever takes its shelf over carries the request out there too, though he had answered for his own."""
    root = tmp_path / "disk"
    cache = open_cache(gpu=8, cpu=16, disk=root)
    fill_disk(cache, 3, seed=3)
    process = subprocess.Popen([sys.executable, "-c", STOPPED, str(Path(__file__).parents[1]), str(root)])
    with ThreadPoolExecutor(1) as pool:
        try:
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            assert traces(root, prompt(4)) == 4
            report = pool.submit(purge, str(root), all=True)
            until(lambda: traces(root, prompt(3, seed=3)) == 0, "the living owner did its part")
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        ended = report.result(60)
    assert (ended["used_pages"], ended["failures"]) == (0, 0)
    assert traces(root, prompt(4)) == 0


def test_a_bump_asks_once_for_all_tenants(open_cache, tmp_path):
    """Within one patience, though a process does not answer."""
    root = tmp_path / "disk"
    cache = open_cache(gpu=8, cpu=64, disk=root)
    for number in range(40):
        fill_disk(cache, 1, seed=100 + number, tenant=f"tenant {number}")
    process = subprocess.Popen([sys.executable, "-c", STOPPED, str(Path(__file__).parents[1]), str(root)])
    try:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        report = cache.bump_version(timeout=0.5)
        assert (report["pages"], report["used_pages"], report["used_shelves"], report["done"]) == (40, 4, 1, False)
        assert report["seconds"] < 40 * 0.5
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def test_a_bump_reaches_all_tenants_of_others(pair):
    root, (one, other), prompts = pair
    tokens = fill_disk(other, 3, seed=9, tenant="acme")
    serve(one, tokens, tenant="acme")  # only namespaces that it knows can it name
    assert one.bump_version(timeout=60)["done"]
    assert [traces(root, gone) for gone in (*prompts, tokens)] == [0, 0, 0]


def test_from_everywhere_at_once(pair):
    """Nobody waits for somebody who waits for him: not for the shelves of the dead that he holds either."""
    root, caches, prompts = pair
    script = STOPPED.replace("SIGSTOP", "SIGKILL")
    subprocess.run([sys.executable, "-c", script, str(Path(__file__).parents[1]), str(root)], check=False)
    with ThreadPoolExecutor(6) as pool:
        reports = [pool.submit(cache.purge, everything=True, timeout=120) for cache in caches]
        reports += [pool.submit(purge, str(root), all=True, patience=120) for _ in range(4)]
        for report in reports:
            ended = report.result()
            assert (ended["used_shelves"], ended["failures"]) == (0, 0)
    assert [traces(root, tokens) for tokens in (*prompts, prompt(4))] == [0, 0, 0]


def test_an_owner_that_is_closed_meanwhile(open_cache, tmp_path):
    """It stops, gives its shelf up, and who asked does the rest."""
    root = tmp_path / "disk"
    cache = open_cache(gpu=256, cpu=256, disk=root, disk_bytes=64 << 20)
    tokens = [fill_disk(cache, 200, seed=seed) for seed in range(8)]
    pages = cache.stats()["disk"]["pages"]
    with ThreadPoolExecutor(1) as pool:
        report = pool.submit(purge, str(root), all=True, patience=120)
        until(lambda: cache.stats()["disk"]["pages"] < pages, "it has begun")
        cache.close(timeout=0.0)
        ended = report.result()
    assert (ended["used_pages"], ended["used_shelves"], ended["failures"]) == (0, 0, 0)
    assert [traces(root, one) for one in tokens] == [0] * 8
