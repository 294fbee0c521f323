"""S12: doctor tells whether a machine and its disk_path can hold the cache that a model and its sessions need."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from pages import prompt, tiny_layout
from support import serve, settle
from tool_kit import kvstrata

from kvstrata import doctor, machine
from kvstrata.config import ConfigError, Settings
from kvstrata.doctor import Row, Subject, examine, exit_code
from kvstrata.gpu import Copy, HostDevice, PagePool, Slab, Transfer
from kvstrata.layout import PageLayout
from kvstrata.selftest import selftest

# 96 MiB for 4,096 tokens: a page of 256 tokens has 6 MiB, and a header of 4 KiB on disk.
MODEL = {"num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 512, "torch_dtype": "bfloat16"}
LAYOUT = PageLayout.from_config(MODEL, page_size=256, dtype="bfloat16")


@pytest.fixture
def files(tmp_path: Path) -> Any:
    """(config.yaml with these kvc2 settings, model folder)."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    def write(**kvc2: Any) -> tuple[Path, Path]:
        (tmp_path / "config.yaml").write_text(json.dumps({"kvc2": {"disk_path": str(tmp_path / "cache"), **kvc2}}))
        return tmp_path / "config.yaml", tmp_path

    return write


def told(ended: Any, check: str) -> dict[str, str]:
    (row,) = (row for row in ended.json["rows"] if row["check"] == check)
    return row


def test_a_directory_that_is_too_small_names_both_numbers(files: Any) -> None:
    config, model = files(disk_size_GB="1GB")
    ended = kvstrata("doctor", "--config", config, "--model", model, "--seq-len", 8192, "--sessions", 16, "--json")
    assert ended.status == ended.json["exit_code"] == 2
    row = told(ended, "disk space for the sessions")
    assert row["state"] == "error"
    assert LAYOUT.slot_bytes == 6 * 2**20 + 4096
    assert "16 sessions x 32 pages of 256 tokens (8,192 tokens each) x 6.3 MB = 3.22 GB; 1 GB can be used" in row["value"]
    assert "at least 3.22 GB" in row["fix"]


def test_a_good_one(files: Any) -> None:
    config, model = files(disk_size_GB="1GB")
    ended = kvstrata("doctor", "--config", config, "--model", model, "--sessions", 4, "--selftest", "--json")
    rows = ended.json["rows"]
    assert [row for row in rows if row["state"] == "error"] == []
    if told(ended, "O_DIRECT")["state"] == "ok":  # some file systems cannot
        assert ended.status == 0
    assert re.search(r"reads .*B/s, writes .*B/s", told(ended, "disk speed")["value"])
    assert [row["value"] for row in rows if row["check"].startswith("self-test")] == ["pages came back as they were"] * 4
    assert "not there yet: it can be made" in told(ended, "disk_path")["value"]
    assert not (model / "cache").exists()  # nothing is left behind
    text = kvstrata("doctor", "--config", config, "--model", model)
    assert "ok       disk_path" in text.out


def test_who_only_looks_makes_no_directory(files: Any, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for folder in ("new", "new/and/deep", "there", "there/new"):
        config, model = files(disk_path=str(tmp_path / folder), disk_size_GB="1GB")
        for command in (("doctor", "--selftest"), ("config", "show")):
            before = sorted(tmp_path.rglob("*"))
            assert kvstrata(*command, "--config", config, "--model", model).status in (0, 1)
            assert sorted(tmp_path.rglob("*")) == before


def test_who_only_looks_leaves_the_mode(files: Any, tmp_path: Path) -> None:
    """An empty directory is this user's alone as soon as a cache opens it, not before."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o755)
    config, model = files(disk_size_GB="1GB")
    for command in (("doctor", "--json"), ("config", "show")):
        ended = kvstrata(*command, "--config", config, "--model", model)
        assert (tmp_path / "cache").stat().st_mode & 0o7777 == 0o755
        if command[0] == "doctor":
            assert told(ended, "disk_path")["value"].endswith("mode 0755, and 0700 once a cache opens it")
    with machine.only_looking(tmp_path / "cache"):  # a cache opens it meanwhile
        (tmp_path / "cache").chmod(0o700)
        (tmp_path / "cache" / "shelves").mkdir()
    assert (tmp_path / "cache").stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize(
    ("kvc2", "sentence"),
    [
        ({"disk_size_GB": "10MB"}, "kvc2.disk_size_GB of 10 MB holds 1 pages of 6.29 MB and needs 4"),
        ({"disk_size_GB": "500PB"}, "is more than the whole file system"),
        ({"cpu_memory_size_GB": "1MB"}, "kvc2.cpu_memory_size_GB of 1 MB holds 0 pages of 6.29 MB and needs 1"),
        ({"gpu_memory_size_GB": "7MB"}, "kvc2.gpu_memory_size_GB of 7 MB holds 1 pages of 6.29 MB and needs 2"),
    ],
)
def test_what_stops_the_start_is_an_error(files: Any, kvc2: dict[str, Any], sentence: str) -> None:
    config, model = files(**kvc2)
    with pytest.raises(ConfigError) as stopped:
        Settings.load(config, environ={}).resolve(LAYOUT)
    assert sentence in str(stopped.value)
    ended = kvstrata("doctor", "--config", config, "--model", model, "--seq-len", 256, "--sessions", 1, "--json")
    assert ended.status == 2
    errors = [f"{row['value']}; {row['fix']}" for row in ended.json["rows"] if row["state"] == "error"]
    assert sum(sentence in error for error in errors) == 1


def test_what_has_no_effect_is_a_warning(files: Any) -> None:
    config, model = files(gpu_only=True)
    ended = kvstrata("doctor", "--config", config, "--model", model, "--seq-len", 256, "--json")
    assert ended.status == 1
    assert told(ended, "settings")["value"] == "kvc2.disk_path: not used, since kvc2.gpu_only is true"


def test_what_somebody_put_there_meanwhile_stays(tmp_path: Path) -> None:
    with machine.only_looking(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    assert (tmp_path / "a" / "b" / "c").is_dir()
    with machine.only_looking(tmp_path / "a" / "d"):
        (tmp_path / "a" / "d").mkdir()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["b"]


def test_a_path_that_cannot_be_made(files: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config, model = files(disk_path=str(tmp_path / "file" / "cache"))
    ended = kvstrata("doctor", "--config", config, "--model", model, "--selftest", "--json")
    assert ended.status == 2
    row = told(ended, "disk_path")
    assert (row["state"], row["fix"]) == ("error", "name a directory that this user can write")
    assert f"{tmp_path}/file/cache cannot be used" in row["value"]


def test_a_file_system_that_hangs_is_a_row(tmp_path: Path, monkeypatch: Any) -> None:
    for place in ("_probe", "_held"):
        monkeypatch.setattr(machine, place, lambda *_: threading.Event().wait())
    settings = Settings.load({"kvc2.disk_path": str(tmp_path)}, environ={})
    rows = list(examine(Subject(settings, None, 4096, 1)))
    assert rows[-1].check == "disk_path"
    assert "did not answer within 0.9 s" in rows[-1].value
    assert exit_code(rows) == 2


def test_what_is_likely_to_be_a_mistake(files: Any) -> None:
    config, model = files(cpu_memory_size_GB="100MB")
    ended = kvstrata("doctor", "--config", config, "--model", model, "--seq-len", 100, "--json")
    assert ended.status >= 1
    assert told(ended, "page size")["state"] == "warning"
    assert told(ended, "CPU tier against GPU tier")["state"] == "warning"


def test_a_request_larger_than_the_pool(files: Any) -> None:
    config, model = files(gpu_memory_size_GB="100MB")
    ended = kvstrata("doctor", "--config", config, "--model", model, "--seq-len", 8192, "--json")
    assert ended.status == 2
    assert "a request of 8,192 tokens does not fit into" in told(ended, "GPU tier for a request")["value"]


def test_what_is_missing_or_foreign(files: Any, monkeypatch: Any) -> None:
    config, model = files()
    (model / "cache" / "shelves").mkdir(parents=True, mode=0o700)
    (model / "cache").chmod(0o700)
    (model / "cache" / "shelves" / "notes.txt").write_text("mine")

    def missing(name: str) -> str:
        raise doctor.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", missing)
    rows = list(examine(Subject(Settings.load(config, environ={}), None, 4096, 1)))
    assert Row("transformers", "warning", "not installed", "the engine needs it: pip install 'kvstrata[engine]'") in rows
    assert any(row.check == "shelves" and "notes.txt is not ours" in row.value for row in rows)
    assert exit_code(rows) == 1


def test_bytes_of_a_page_on_disk(open_cache: Any, tmp_path: Path) -> None:
    cache = open_cache(gpu=8, cpu=8, disk=tmp_path / "disk")
    serve(cache, prompt(3))
    settle(cache)
    (space,) = kvstrata("inspect", tmp_path / "disk", "--json").json["namespaces"]
    assert space["bytes"] == 3 * tiny_layout().slot_bytes


class Corrupting(HostDevice):
    def start(self, copy: Copy, pool: PagePool, slab: Slab) -> Transfer:
        ended = super().start(copy, pool, slab)
        if copy.up:
            pool.data[int(copy.device_rows[0]), 7] += 1
        return ended


def test_the_self_test_notices_a_changed_byte(tmp_path: Path) -> None:
    assert selftest(tmp_path, Corrupting())["cpu"] == "1 pages came back changed"  # type: ignore[arg-type]


def test_the_kind_of_file_system(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n40 22 0:35 / {tmp_path}/a\\040b rw shared:7 - nfs4 server:/x rw\n"
    )
    (tmp_path / "a b" / "c").mkdir(parents=True)
    assert machine.file_system(tmp_path / "a b" / "c", mounts) == "nfs4"
    assert machine.file_system(tmp_path, mounts) == "ext4"
    assert machine.file_system(tmp_path, tmp_path / "none") == "unknown"


@pytest.mark.parametrize("arguments", [["--seq-len", "0"], ["--model", "nowhere"], ["--config", "nowhere.yaml"]])
def test_wrong_arguments(arguments: list[str]) -> None:
    ended = kvstrata("doctor", *arguments)
    assert ended.status == 2
    assert ended.err.count("\n") == 1
