"""`kvstrata bench`: the rows that it promises, and that wrong data ends it. What is fast enough is no question of a test."""

import pytest
from tool_kit import kvstrata

from kvstrata.bench import copy, disk, held, match, ttft
from kvstrata.bench.report import WrongData, compare
from kvstrata.cache import CacheFull

SMALL = ("--tokens", 2048, "--pages", 2000, "--rounds", 2)


@pytest.fixture(autouse=True)
def small_sweep(monkeypatch):
    """What pushes everything out of the largest processor cache may be a GiB."""
    monkeypatch.setattr(match, "SWEEP_MOST", 1 << 22)


def test_match_measures_every_case_beside_its_limit():
    ended = kvstrata("bench", "match", *SMALL, "--json")
    assert ended.status == 0, ended.err
    rows = ended.json["rows"]
    cases = [(row["case"], row["page_size"], row.get("turns")) for row in rows]
    for size in (16, 256):
        assert cases[:8] == [
            *((case, size, turns) for turns in (1, 128) for case in ("match", "match_hot")),
            *((case, size, None) for case in ("from_list", "miss", "evict", "publish")),
        ]
        del cases[:8]
    assert not cases
    for row in rows:
        assert row["value"] > 0
        assert row["spread"][0] <= row["value"] <= row["spread"][1]
        assert (row["limit"] is None) == (row["ratio"] is None) == (row["case"] in ("from_list", "miss", "evict"))
    assert {"python", "numpy", "kvstrata"} <= set(ended.json["machine"]["versions"])
    assert ended.json["machine"]["load_average"] >= 0


def test_match_prints_a_line_for_each_row():
    ended = kvstrata("bench", "match", *SMALL, "--page-size", 256)
    assert ended.status == 0, ended.err
    lines = ended.out.splitlines()
    assert "load" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == "match match_hot match match_hot from_list miss evict publish".split()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--tokens", 1000, "--page-size", 256), "--tokens 1000 is not a multiple of the page size 256"),
        (("--tokens", 2048, "--page-size", 24), "--page-size: "),
        (("--tokens", 131072, "--pages", 1000), "--pages 1000 cannot hold the prompts"),
        (("--folder", "/nowhere"), "--folder /nowhere is no directory: make it first"),
        (("--rounds", 0), "--rounds"),
    ],
)
def test_options_that_cannot_be(options, sentence):
    ended = kvstrata("bench", "match", *options)
    assert ended.status == 2
    assert sentence in ended.err


def test_wrong_data_ends_a_benchmark(monkeypatch):
    """A cache that finds half of what it should is fast, and worth nothing."""
    real = match.lease_once
    monkeypatch.setattr(match, "lease_once", lambda cache, tokens: real(cache, tokens[: len(tokens) // 2]))
    ended = kvstrata("bench", "match", *SMALL)
    assert ended.status == 2
    assert "the benchmark failed: 1008 of 2048 cached tokens were found" in ended.err
    assert issubclass(WrongData, RuntimeError)


CASES = (copy.Case(256, 1, 1), copy.Case(16, 1, copy.LAYERS))


def test_copy_measures_rows_and_layers(monkeypatch):
    monkeypatch.setattr(copy, "CASES", CASES)
    ended = kvstrata("bench", "copy", "--mib", 4, "--rounds", 2, "--json")
    assert ended.status == 0, ended.err
    rows = ended.json["rows"]
    assert [(row["case"], row["page_size"], row["layers"]) for row in rows] == [
        (case, one.page_size, one.layers) for one in CASES for case in ("save", "load")
    ]
    for row in rows:
        assert row["unit"] == "GB/s"
        assert row["value"] > 0
        assert row["limit"] > 0
        assert row["pages"] == 4


@pytest.mark.parametrize("device", [copy.PoolRows, copy.LayeredBlocks])
def test_a_wrong_byte_ends_a_copy_benchmark(monkeypatch, device):
    real = device.found

    def one_byte_off(self):
        found = real(self).copy()
        found[-1, -1] ^= 1
        return found

    monkeypatch.setattr(copy, "CASES", CASES)
    monkeypatch.setattr(device, "found", one_byte_off)
    ended = kvstrata("bench", "copy", "--mib", 2, "--rounds", 1)
    assert ended.status == 2
    assert "the benchmark failed: pages did not come back as they were saved" in ended.err


def test_disk_measures_idle_and_busy(tmp_path):
    ended = kvstrata("bench", "disk", "--mib", 8, "--rounds", 1, "--folder", tmp_path, "--json")
    assert ended.status == 0, ended.err
    rows = {row["case"]: row for row in ended.json["rows"]}
    assert list(rows) == ["read", "write", "read_busy", "write_busy"]
    for name in ("read", "write"):
        assert rows[name]["pages"] == 4
        assert rows[f"{name}_busy"]["limit"] == rows[name]["value"]
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_byte_ends_a_disk_benchmark(monkeypatch, tmp_path):
    real = disk.write

    def other_bytes(cache, tokens, content, busy):
        return real(cache, tokens, content ^ 1, busy)

    monkeypatch.setattr(disk, "write", other_bytes)
    ended = kvstrata("bench", "disk", "--mib", 4, "--rounds", 1, "--folder", tmp_path)
    assert ended.status == 2
    assert "the benchmark failed: pages did not come back as they were written" in ended.err


@pytest.mark.slow
def test_ttft_measures_every_tier(tmp_path):
    options = ("--tokens", 128, "--page-size", 64, "--rounds", 1, "--folder", tmp_path)
    ended = kvstrata("bench", "ttft", *options, "--json")
    assert ended.status == 0, ended.err
    rows = ended.json["rows"]
    assert [row["case"] for row in rows] == ["ttft_gpu", "ttft_cpu", "ttft_restart", "restart_wall"]
    for row in rows[:3]:
        assert row["value"] > 0
        assert row["limit"] > 0
        assert row["copy_ms"] >= 0
    assert list(tmp_path.iterdir()) == []


def test_ttft_refuses_what_cannot_be():
    assert "--dtype int8 is not known: use one of" in kvstrata("bench", "ttft", "--dtype", "int8").err
    assert "is not a multiple of the page size 256" in kvstrata("bench", "ttft", "--tokens", 100).err
    assert (
        "--model" in kvstrata("bench", "ttft", "--model", "/nowhere").err
        or "/nowhere" in kvstrata("bench", "ttft", "--model", "/nowhere").err
    )


def test_a_benchmark_waits_for_nothing_for_ever(monkeypatch, open_cache):
    monkeypatch.setattr(held, "FLUSH_S", 0.0)
    cache = open_cache(gpu=4)
    with cache.lease(held.random_tokens(4 * cache.page_size, 1), must=True), pytest.raises(CacheFull):
        held.lease(cache, held.random_tokens(cache.page_size, 2))
    monkeypatch.setattr(ttft, "QUIET_S", 0.0)
    with pytest.raises(WrongData, match="goes on computing"):
        ttft.quiet()


def test_ratios_are_of_single_rounds():
    row = compare("some", "ms", [1.0, 2.0, 30.0], [1.0, 1.0, 10.0], page_size=16)
    assert (row.value, row.limit, row.ratio) == (2.0, 1.0, 2.0)
    assert row.as_dict()["page_size"] == 16
