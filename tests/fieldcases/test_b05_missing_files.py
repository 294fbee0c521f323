"""B5: files vanish, are cut off, forbidden or replaced under a cache that works: what was in them misses, and that is all."""

import os
import random
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from support import PAGE, begin, finish, prompt, serve, settle, until
from tool_kit import kvstrata, segments

from kvstrata.cache import CacheFull

HARMS = ["delete", "truncate", "forbid", "directory"]
PROMPTS = 24
THREADS = 8


def harm(path: Path, how: str) -> None:
    match how:
        case "delete":
            path.unlink()
        case "truncate":
            os.truncate(path, path.stat().st_size // 2)
        case "forbid":
            path.chmod(0)
        case "directory":
            path.unlink()
            path.mkdir(0o700)


@pytest.mark.parametrize("how", HARMS)
def test_a_fifth_of_the_files(open_cache, tmp_path, how):
    root = tmp_path / "cache"
    cache = open_cache(gpu=64, cpu=24, disk=root, disk_bytes=1 << 20, look_every=0.05, retry_after=0.05)
    for seed in range(PROMPTS):
        serve(cache, prompt(5, seed))
        settle(cache)
    over = threading.Event()
    broken: list[BaseException] = []

    def work(number: int) -> None:
        dice = random.Random(number)
        try:
            while not over.is_set():
                tokens = prompt(dice.randint(2, 5), dice.randrange(2 * PROMPTS))
                with suppress(CacheFull):  # for a moment, while loads for others have the rows
                    finish(cache, begin(cache, tokens), tokens)
        except BaseException as error:
            broken.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        files = segments(root)
        harmed = random.Random(how).sample(files, max(1, len(files) // 5))
        for path in harmed:
            harm(path, how)
        if how in ("delete", "directory"):  # one that is open goes on working; one that was cut off may be written whole again
            until(lambda: broken or cache.stats()["disk"]["vanished_segments"] == len(harmed), "the files are missed")
        before = cache.stats()["leases"]
        until(lambda: broken or cache.stats()["leases"] > before + 200, "requests go on")
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not broken
    settle(cache)
    until(lambda: cache.stats()["disk"]["health"] == "ok" or serve(cache, prompt(5, 999)) is None, "the tier works")
    for path in [path for path in harmed if path.is_dir()]:
        shutil.rmtree(path)

    def accounted_for():
        return cache.stats()["disk"]["bytes"] == sum(path.stat().st_size for path in segments(root))

    until(accounted_for, "what is accounted for is there")
    pages = cache.stats()["disk"]["pages"]
    cache.close()
    for path in segments(root):
        path.chmod(0o600)
    found = kvstrata("verify", root, "--json")
    assert found.status == 0, found.out
    assert found.json["sound"] == pages
    again = open_cache(gpu=8, cpu=24, disk=root, disk_bytes=1 << 20)
    assert again.stats()["disk"]["pages"] == pages
    reused = 0
    for seed in range(2 * PROMPTS):
        reused += serve(again, prompt(5, seed)).disk
        settle(again)
    assert reused >= 4 * PAGE
