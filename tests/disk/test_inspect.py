"""`kvstrata inspect`: what it tells of a directory, and that it believes nothing and changes nothing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import serve, settle, tiny_identity, tiny_layout
from tool_kit import fill_disk, kvstrata, segments, snapshot

from kvstrata.identity import Identity


@pytest.fixture
def identity():
    layout = tiny_layout()
    base = tiny_identity(layout)
    return Identity(base.weights, base.config, base.dtype, base.page_size, base.planes, base.tag, label="Tiny-1B")


def test_namespaces_and_shelves(open_cache, tmp_path, identity):
    root = tmp_path / "disk"
    cache = open_cache(gpu=12, cpu=40, disk=root, identity=identity)
    fill_disk(cache, 10)
    fill_disk(cache, 4, seed=6, tenant="acme")
    began = time.time()
    for alive in (True, False):
        if not alive:
            cache.close()
        before = snapshot(root)
        found = kvstrata("inspect", root, "--json").json
        assert snapshot(root) == before
        spaces = {space["namespace"]: space for space in found["namespaces"]}
        ours = spaces[cache.namespace().hex()]
        assert (ours["model"], ours["dtype"], ours["page_size"], ours["tenant"]) == ("Tiny-1B", "float32", 16, False)
        assert (ours["pages"], ours["bytes"]) == (10, 10 * 8192)
        assert began - 60 < ours["oldest_use"] <= ours["last_use"] < began + 60
        theirs = spaces[cache.namespace(tenant="acme").hex()]
        assert (theirs["model"], theirs["pages"], theirs["page_size"]) == (None, 4, 16)
        (shelf,) = found["shelves"]
        assert shelf["alive"] is alive
        assert [segment["name"] for segment in shelf["segments"]] == [path.name for path in segments(root)]
        assert sum(segment["pages"] for segment in shelf["segments"]) == 14
        assert found["problems"] == found["unknown"] == []
        assert found["allocated"] >= sum(path.stat().st_size for path in segments(root))

        status, out, err = kvstrata("inspect", root)
        assert (status, err) == (0, "")
        assert f"{cache.namespace().hex()[:12]}   Tiny-1B" in out
        assert "(not described)" in out
        assert (" lives " if alive else " none ") in out
        assert "14 pages" in out


def test_problems_are_told(open_cache, tmp_path):
    root = tmp_path / "disk"
    cache = open_cache(gpu=24, cpu=40, disk=root)
    fill_disk(cache, 23)
    cache.close()
    first, second, third, fourth = segments(root)
    for path, at, data in ((first, 4096 + 128 + 9, b"x"), (second, 20, b"x"), (third, 0, b"\x80\x04pickle")):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(data)
    os.truncate(fourth, 8192 + 8192)
    (root / "core.17").write_bytes(b"dump")
    (root / "shelves" / "tmp").mkdir()
    found = kvstrata("inspect", root, "--json").json
    problems = "\n".join(found["problems"])
    assert f"{first.name} has 1 damaged record:" in problems
    assert f"{second.name} has no sound header block" in problems
    assert f"{third.name} is no segment, or its header block is lost" in problems
    assert f"{fourth.name} was cut short: " in problems
    assert "core.17 is not ours" in problems
    assert "shelves/tmp is not ours" in problems
    assert len(found["problems"]) == 6
    assert {file["path"] for file in found["unknown"]} == {"core.17", "shelves/tmp"}
    assert kvstrata("inspect", root).out.count("! ") == 6


def hostile(path: Path) -> list[str]:
    bomb = "[" * 60000
    deep = '{"model": ' + '{"model": ' * 5000 + "1" + "}" * 5001
    return ["", "null", "[1, 2]", "\0" * 4096, bomb, deep, '{"model": "' + "x" * 70000 + '"}', '{"layers": 1' + "0" * 5000 + "}"]


@pytest.mark.parametrize("case", range(8))
def test_descriptions_that_lie(open_cache, tmp_path, case):
    root = tmp_path / "disk"
    cache = open_cache(gpu=12, cpu=40, disk=root)
    fill_disk(cache, 2)
    (root / "namespaces" / f"{cache.namespace().hex()}.json").write_text(hostile(root)[case])
    (space,) = kvstrata("inspect", root, "--json").json["namespaces"]
    assert (space["model"], space["dtype"], space["pages"]) == (None, None, 2)
    assert kvstrata("inspect", root).status == 0


def test_a_description_cannot_write_on_the_terminal(open_cache, tmp_path):
    root = tmp_path / "disk"
    cache = open_cache(gpu=12, cpu=40, disk=root)
    fill_disk(cache, 2)
    said = {"model": "\x1b[2Jgone\r\n[red]no[/red]\u202e", "dtype": 7, "tenant": "yes", "layers": -1}
    (root / "namespaces" / f"{cache.namespace().hex()}.json").write_text(json.dumps(said))
    (space,) = kvstrata("inspect", root, "--json").json["namespaces"]
    assert space["model"] == "?[2Jgone??[red]no[/red]?"
    assert (space["dtype"], space["tenant"], space["layers"]) == (None, False, None)
    out = kvstrata("inspect", root).out
    assert "[red]no[/red]" in out
    assert "\x1b" not in out


def test_links_pipes_and_directories_in_the_place_of_files(open_cache, tmp_path):
    root, outside = tmp_path / "disk", tmp_path / "outside.json"
    cache = open_cache(gpu=12, cpu=40, disk=root)
    fill_disk(cache, 9)
    cache.close()
    outside.write_text('{"model": "outside"}')
    description = root / "namespaces" / f"{cache.namespace().hex()}.json"
    description.unlink()
    description.symlink_to(outside)
    first, second = segments(root)
    first.unlink()
    os.mkfifo(first)
    second.rename(tmp_path / "seg")
    second.symlink_to(tmp_path / "seg")
    (root / "namespaces" / ("0" * 64 + ".json")).mkdir()
    found = kvstrata("inspect", root, "--json").json
    assert all(space["model"] is None and space["pages"] == 0 for space in found["namespaces"])
    assert len(found["problems"]) == 3
    assert kvstrata("verify", root, "--json").json["sound"] == 0


@pytest.mark.parametrize("command", ["inspect", "verify", "purge"])
def test_directories_that_are_not_caches(tmp_path, command):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "missing", tmp_path / "file", tmp_path / "empty"):
        status, out, err = kvstrata(command, path)
        assert (status, out) == (2, "")
        assert f"{path} holds no cache" in err
        assert err.count("\n") == 1
    assert not (tmp_path / "missing").exists()
    assert list((tmp_path / "empty").iterdir()) == []


def test_by_config_or_environment(open_cache, tmp_path, monkeypatch):
    root, config = tmp_path / "disk", tmp_path / "config.yaml"
    fill_disk(open_cache(gpu=12, cpu=40, disk=root), 2)
    config.write_text(f"kvc2: {{disk_path: {root}}}\n")
    assert kvstrata("inspect", "--config", config, "--json").json["path"] == str(root)
    status, _, err = kvstrata("inspect")
    assert status == 2
    assert "no cache directory is named" in err
    assert kvstrata("inspect", root, "--config", config).status == 2
    config.write_text("kvc2: {disk_pth: x}\n")
    assert "disk_pth" in kvstrata("inspect", "--config", config).err
    monkeypatch.setenv("KVSTRATA_KVC2_DISK_PATH", str(root))
    assert kvstrata("inspect", "--json").json["path"] == str(root)


def test_no_torch_is_needed(open_cache, tmp_path):
    root = tmp_path / "disk"
    cache = open_cache(gpu=12, cpu=40, disk=root)
    fill_disk(cache, 3)
    cache.close()
    code = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from kvstrata.cli import main
main()
"""
    for arguments, part in (
        (["inspect"], "3 pages"),
        (["verify"], "3 pages sound"),
        (["purge", "--all", "--yes"], "dropped 3 pages"),
    ):
        command = [sys.executable, "-c", code, arguments[0], str(root), *arguments[1:]]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert part in ended.stdout


def test_what_was_used_since_it_was_written(open_cache, tmp_path):
    root = tmp_path / "disk"

    def uses():
        (space,) = kvstrata("inspect", root, "--json").json["namespaces"]
        return space["uses"]

    cache = open_cache(gpu=8, cpu=16, disk=root)
    tokens = fill_disk(cache, 4)
    serve(cache, tokens)
    cache.close()
    assert uses() == 0  # it was written within the minute
    cache = open_cache(gpu=8, cpu=16, disk=root)
    serve(cache, tokens)
    settle(cache)
    cache.close()
    assert uses() == 4  # three were read, and the last one computed again
