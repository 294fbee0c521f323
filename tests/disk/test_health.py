"""The health of the disk tier: in the stats, and once per change in the log; damaged and vanished segments while a cache runs."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import PAGE, crowd, disk_usage, no_writes_beyond, prompt, serve, settle, until
from tool_kit import fill_disk, segments

from kvstrata.cache import PrefixCache
from kvstrata.health import HealthLog
from kvstrata.hits import HitWatch

Open = Callable[..., PrefixCache]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "disk tier" in record.getMessage()]


def test_a_full_disk_is_one_line_and_so_is_its_end(open_cache: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvstrata")
    cache = open_cache(8, 8, tmp_path, retry_after=0.05)
    with no_writes_beyond(4096):
        for seed in range(3):
            serve(cache, prompt(2, seed=seed))
            settle(cache)
        stats = cache.stats()
        assert stats["disk"]["health"].startswith("no new pages: ")
        assert stats["disk"]["health_since"] > 0
        assert stats["disk"]["pages"] == 0
        assert stats["spills_dropped"] > 0
        until(lambda: lines(caplog), "a line about it")

    def works_again() -> bool:
        serve(cache, prompt(2))
        settle(cache)
        return bool(cache.stats()["disk"]["pages"] == 2)

    until(works_again, "the pages are saved when they are used again")
    assert cache.stats()["disk"]["health"] == "ok"
    assert cache.stats()["disk"]["health_since"] == 0
    until(lambda: len(lines(caplog)) > 1, "a line that it works again")
    assert [("no new pages" in line, "works again" in line) for line in lines(caplog)] == [(True, False), (False, True)]
    assert str(tmp_path) in lines(caplog)[0]


def test_the_same_trouble_is_not_told_again_at_once(caplog: pytest.LogCaptureFixture) -> None:
    class Silent:
        def wait_health(self, seen: int, seconds: float) -> tuple[int, str, float, bool]:
            return 0, "ok", 0.0, True

    caplog.set_level(logging.INFO, "kvstrata")
    core: Any = Silent()
    health = HealthLog(core, "/cache", HitWatch(core, "/cache"))
    for sentence in ("no new pages: x", "ok", "no new pages: x", "ok", "no new pages: y", "ok"):
        health.tell(sentence, 1000.0)
    assert [line.split(": ", 1)[1].split(" (")[0].split(" after")[0] for line in lines(caplog)] == [
        "no new pages: x",
        "works again",
        "no new pages: y",
        "works again",
    ]


def test_requests_are_counted_and_merged(open_cache: Open, tmp_path: Path) -> None:
    cache = open_cache(8, 10, tmp_path)
    tokens = fill_disk(cache, 5)
    crowd(cache, 3)
    assert serve(cache, tokens).disk == 4 * PAGE  # of five pages, whose last token is computed
    disk = cache.stats()["disk"]
    assert disk["read_pages"] >= 4
    assert 0 < disk["read_requests"] <= disk["read_pages"]
    assert disk["read_bytes"] == disk["read_pages"] * 8192
    assert 0 < disk["write_requests"] < disk["write_pages"], "adjacent slots go in one request"
    assert disk["health"] == "ok"
    assert isinstance(disk["direct"], bool)
    assert isinstance(disk["io_uring"], bool)


def test_adopted_pages_are_counted_and_a_lost_table_is_rebuilt_while_the_cache_runs(open_cache: Open, tmp_path: Path) -> None:
    cache = open_cache(8, 10, tmp_path)
    tokens = fill_disk(cache, 5)
    cache.close()
    assert cache.stats()["disk"]["adopted_pages"] == 0
    for path in segments(tmp_path):
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(bytes(4096))
    again = open_cache(8, 10, tmp_path)
    until(lambda: again.stats()["disk"]["rebuilt_pages"] == 5, "the pages are found again")
    assert again.stats()["disk"]["unproven_slots"] == 0
    assert again.stats()["disk"]["damaged_records"] >= 5
    assert serve(again, tokens).disk == 4 * PAGE
    again.close()
    heir = open_cache(8, 10, tmp_path)
    assert heir.stats()["disk"]["adopted_pages"] == 5
    assert heir.stats()["disk"]["damaged_records"] == 0


def test_a_wiped_directory_is_noticed_and_filled_again(open_cache: Open, tmp_path: Path) -> None:
    cache = open_cache(8, 10, tmp_path / "cache", look_every=0.05)
    tokens = fill_disk(cache, 5)
    gone = len(segments(tmp_path / "cache"))
    for child in (tmp_path / "cache").iterdir():
        if child.is_dir():
            shutil.rmtree(child)
        else:
            child.unlink()
    until(lambda: cache.stats()["disk"]["vanished_segments"] == gone, "the files are missed")
    until(lambda: cache.stats()["disk"]["pages"] == 0, "their pages are forgotten")
    assert cache.stats()["disk"]["bytes"] == 0
    serve(cache, tokens)  # from memory: a use is a chance to save
    settle(cache)
    assert cache.stats()["disk"]["pages"] == 5
    assert 0 < cache.stats()["disk"]["bytes"] <= disk_usage(tmp_path / "cache")
    assert cache.stats()["disk"]["health"] == "ok"
