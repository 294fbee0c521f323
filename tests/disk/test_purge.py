"""`kvstrata purge`: what is dropped is gone from the files, prompt tokens included, and everything else is served as before."""

import io
import json
import os
import sys
import time

import numpy as np
import pytest
from support import PAGE, flip, prompt, serve, settle
from tool_kit import fill_disk, kvstrata, segments, slot_of, snapshot, traces


@pytest.fixture
def two_spaces(open_cache, tmp_path):
    """(directory, its closed cache, the prompt of all, the prompt of a tenant)."""
    root = tmp_path / "disk"
    cache = open_cache(gpu=12, cpu=40, disk=root)
    shared = fill_disk(cache, 10)
    private = fill_disk(cache, 6, seed=6, tenant="acme")
    cache.close()
    assert (traces(root, shared), traces(root, private)) == (10, 6)
    return root, cache, shared, private


def test_everything(open_cache, two_spaces):
    root, _, shared, private = two_spaces
    (root / "notes.txt").write_text("mine")
    ended = kvstrata("purge", root, "--all", "--yes", "--json")
    assert ended.status == 0
    assert (ended.json["pages"], ended.json["bytes"], ended.json["done"]) == (16, 16 * 8192, True)
    assert ended.json["freed"] == 3 * 65536
    assert (traces(root, shared), traces(root, private)) == (0, 0)
    left = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    assert left == ["lock", "namespaces", "notes.txt", "requests", "secret", "shelves"]
    assert kvstrata("inspect", root, "--json").json["namespaces"] == []
    assert serve(open_cache(gpu=12, cpu=40, disk=root), shared).hit == 0


def test_one_namespace(open_cache, two_spaces):
    root, cache, shared, private = two_spaces
    name = cache.namespace(tenant="acme").hex()
    status, out, _ = kvstrata("purge", root, "--namespace", name[:10].upper(), "--yes")
    assert status == 0
    assert "dropped 6 pages (49.2 kB)" in out
    assert (traces(root, shared), traces(root, private)) == (10, 0)
    assert kvstrata("verify", root, "--json").json["sound"] == 10
    again = open_cache(gpu=12, cpu=40, disk=root)
    assert serve(again, shared).disk == 9 * PAGE
    settle(again)
    assert serve(again, private, tenant="acme").hit == 0
    settle(again)
    again.close()
    # The other way round: the description goes with the last page.
    assert list((root / "namespaces").iterdir())
    assert kvstrata("purge", root, "--namespace", cache.namespace().hex(), "--yes", "--json").json["namespaces"] == 1
    assert not list((root / "namespaces").iterdir())
    assert traces(root, shared) == 0


def test_pages_that_were_gone_already(open_cache, two_spaces):
    """Evicted or dropped pages have no records any more, but until their slots are used again their headers tell their tokens."""
    root, cache, shared, private = two_spaces
    path, slot = slot_of(root, cache, shared, 4)
    flip(path, slot + 4096)
    assert kvstrata("verify", root, "--repair", "--json").json["dropped"] == 1
    assert traces(root, shared) == 10
    report = kvstrata("purge", root, "--namespace", "f" * 64, "--yes", "--json").json  # of nobody
    assert (report["pages"], report["leftovers"]) == (0, 1)
    assert (traces(root, shared), traces(root, private)) == (9, 6)
    assert kvstrata("verify", root, "--json").json["sound"] == 15


def test_by_age(open_cache, two_spaces, monkeypatch):
    root, _, shared, private = two_spaces
    for age in ("1h", "2d", "1w", "90min"):
        ended = kvstrata("purge", root, "--older-than", age, "--yes", "--json")
        assert (ended.status, ended.json["pages"]) == (0, 0)
    later = time.time() + 7201
    monkeypatch.setattr(time, "time", lambda: later)
    assert kvstrata("purge", root, "--older-than", "2h", "--yes", "--json").json["pages"] == 16
    assert (traces(root, shared), traces(root, private)) == (0, 0)


def test_to_a_size(open_cache, tmp_path):
    root = tmp_path / "disk"
    cache = open_cache(gpu=24, cpu=40, disk=root)
    tokens = fill_disk(cache, 21)
    cache.close()
    assert len(segments(root)) == 3
    before = kvstrata("inspect", root, "--json").json["allocated"]
    assert kvstrata("purge", root, "--to-size", "1GB", "--yes", "--json").json["segments"] == 0
    ended = kvstrata("purge", root, "--to-size", f"{before - 1}B", "--yes", "--json")
    assert (ended.status, ended.json["segments"], ended.json["pages"]) == (0, 1, 7)
    assert ended.json["allocated"] == before - 65536
    assert traces(root, tokens) == 14
    status, out, _ = kvstrata("purge", root, "--to-size", "1kB", "--yes")
    assert status == 1  # the directories alone take more
    assert "removed 2 segments" in out
    assert traces(root, tokens) == 0


def test_damaged_segments_are_cleaned_too(open_cache, two_spaces):
    root, cache, shared, private = two_spaces
    first, second, _ = segments(root)
    flip(first, 30)  # the header block
    flip(second, 4096 + 128 + 60)  # a record
    path, slot = slot_of(root, cache, shared, 9)
    flip(path, slot + 100)  # a header that proves nothing any more, with its tokens in clear
    ended = kvstrata("purge", root, "--namespace", cache.namespace().hex(), "--yes", "--json")
    assert ended.status == 0
    assert (traces(root, shared), traces(root, private)) == (0, 6)
    assert kvstrata("verify", root, "--repair", "--json").json["sound"] == 6


def test_files_that_are_not_ours_stay(two_spaces):
    root, *_ = two_spaces
    shelf = segments(root)[0].parent
    strangers = {
        shelf / "seg-000077.kvs": b"cos\nsystem\n",
        shelf / "index.pkl": b"\x80\x04.",
        root / "shelves" / "README": b"hello",
    }
    for path, content in strangers.items():
        path.write_bytes(content)
    report = kvstrata("purge", root, "--all", "--yes", "--json").json
    assert (report["pages"], report["unknown"]) == (16, 1)
    assert {path: path.read_bytes() for path in strangers} == strangers


def test_it_works_where_nothing_can_be_allocated(two_spaces, monkeypatch):
    """A full disk is why people purge: nothing may be written but what is overwritten."""
    root, cache, shared, private = two_spaces
    sizes = {path: os.stat(path).st_size for path in root.rglob("*") if path.is_file()}
    assert kvstrata("purge", root, "--namespace", cache.namespace(tenant="acme").hex(), "--yes").status == 0
    for path in root.rglob("*"):
        assert not path.is_file() or os.stat(path).st_size == sizes.get(path, 0)  # requests: empty
    assert (traces(root, shared), traces(root, private)) == (10, 0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "say what to drop"),
        (["--all", "--older-than", "1d"], "say what to drop"),
        (["--older-than", "soon"], "--older-than soon is not an age"),
        (["--older-than", "7"], "--older-than 7 is not an age"),
        (["--to-size", "big"], "--to-size big is not a size"),
        (["--namespace", "xyz"], "--namespace xyz is not the beginning of a namespace"),
        (["--namespace", ""], "is not the beginning of a namespace"),
        (["--all"], "this would drop all pages"),
        (["--all", "--json"], "say --yes if that is meant"),
    ],
)
def test_refused(two_spaces, options, sentence):
    root, *_ = two_spaces
    before = snapshot(root)
    status, out, err = kvstrata("purge", root, *options, *([] if options[:1] == ["--all"] else ["--yes"]))
    assert (status, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert snapshot(root) == before


def test_a_namespace_must_be_the_only_one_that_begins_so(two_spaces, monkeypatch):
    root, *_ = two_spaces
    from kvstrata import survey

    monkeypatch.setattr(
        survey, "survey", lambda path: {"namespaces": [{"namespace": "ab" + "0" * 62}, {"namespace": "ab" + "1" * 62}]}
    )
    assert "2 namespaces begin with ab:" in kvstrata("purge", root, "--namespace", "ab", "--yes").err
    assert "no namespace begins with c:" in kvstrata("purge", root, "--namespace", "c", "--yes").err


@pytest.mark.parametrize(("answer", "status", "left"), [("n\n", 130, 16), ("y\n", 0, 0)])
def test_it_asks_on_a_terminal(two_spaces, monkeypatch, answer, status, left):
    root, *_ = two_spaces
    terminal = io.StringIO(answer)
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    ended = kvstrata("purge", root, "--all")
    assert ended.status == status
    assert f"Drop all pages from {root}?" in ended.out + ended.err
    assert kvstrata("inspect", root, "--json").json["shelves"] == [] or left
    assert sum(space["pages"] for space in kvstrata("inspect", root, "--json").json["namespaces"]) == left


def test_pages_saved_after_a_purge_are_served(open_cache, two_spaces):
    root, _, shared, _ = two_spaces
    kvstrata("purge", root, "--all", "--yes")
    cache = open_cache(gpu=12, cpu=40, disk=root)
    serve(cache, shared)
    settle(cache)  # until its pages are saved, the pool has no room for the next
    serve(cache, prompt(5, seed=77))
    settle(cache)
    cache.close()
    assert kvstrata("verify", root, "--json").json["sound"] == 15
    found = kvstrata("inspect", root, "--json").json
    assert found["namespaces"][0]["dtype"] == "float32"


def test_a_prefix_and_all_that_continues_it(open_cache, tmp_path):
    root = tmp_path / "disk"
    cache = open_cache(gpu=24, cpu=60, disk=root)
    trunk = fill_disk(cache, 4)
    branches = [np.concatenate([trunk, prompt(3, seed=seed)]) for seed in (1, 2)]
    other = fill_disk(cache, 3, seed=9)
    for tokens in branches:
        serve(cache, tokens)
        settle(cache)
    cache.close()
    file = tmp_path / "tokens"
    file.write_text(json.dumps(branches[0][: 5 * PAGE + 3].tolist()))  # five full pages
    report = kvstrata("purge", root, "--prefix", file, "--yes", "--json").json
    assert (report["pages"], report["done"]) == (3, True)
    assert (traces(root, branches[0]), traces(root, branches[1]), traces(root, other)) == (4, 7, 3)
    file.write_text(" ".join(map(str, trunk[: 2 * PAGE])))
    wrong = cache.namespace(tenant="acme").hex()
    assert kvstrata("purge", root, "--prefix", file, "--namespace", wrong, "--yes", "--json").json["pages"] == 0
    assert kvstrata("purge", root, "--prefix", file, "--yes", "--json").json["pages"] == 3 + 3
    assert (traces(root, branches[0]), traces(root, other)) == (1, 3)
    assert kvstrata("verify", root, "--json").json["sound"] == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [("1 2 3", "3 tokens"), ("one two", "token ids"), ("[1.5]", "token ids"), ('{"a": 1}', "token ids"), (None, "cannot be read")],
)
def test_a_prefix_that_is_none(two_spaces, tmp_path, text, words):
    file = tmp_path / "tokens"
    if text is not None:
        file.write_text(text)
    ended = kvstrata("purge", two_spaces[0], "--prefix", file, "--yes")
    assert ended.status == 2
    assert words in ended.err
