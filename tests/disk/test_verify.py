"""`kvstrata verify`: reads and proves everything, tells every kind of damage, and drops what is bad where it may."""

import _thread
import os
import shutil
import threading

import pytest
from support import PAGE, flip, prompt, serve, settle, tiny_identity
from tool_kit import ROW_AT, fill_disk, kvstrata, segments, slot_of, snapshot

from kvstrata import _core
from kvstrata.cli.directory import patiently
from kvstrata.cli.tables import bar
from kvstrata.layout import PageLayout, PlaneSpec

PAGES = 10
FIELDS = ((20, 4), (24, 8), (32, 8), (56, 8))  # of a segment's header: header_bytes, row_bytes, row_stride, slots_offset


@pytest.fixture
def saved(open_cache, tmp_path):
    """(directory, the cache that wrote it, closed; its prompt): ten pages in two segments of seven slots."""
    root = tmp_path / "disk"
    cache = open_cache(gpu=12, cpu=40, disk=root)
    tokens = fill_disk(cache, PAGES)
    cache.close()
    return root, cache, tokens


def test_a_sound_directory(open_cache, tmp_path):
    root = tmp_path / "disk"
    cache = open_cache(gpu=12, cpu=40, disk=root)
    fill_disk(cache, PAGES)
    for options in ([], ["--repair"]):
        before = snapshot(root)
        ended = kvstrata("verify", root, "--json", *options)  # beside its living owner
        assert ended.status == 0
        assert (ended.json["sound"], ended.json["left"], ended.json["bytes"]) == (PAGES, 0, PAGES * 8192)
        assert ended.json["shelves"][0]["alive"] is True
        assert snapshot(root) == before
    cache.close()
    status, out, err = kvstrata("verify", root)
    assert (status, err) == (0, "")
    assert "10 pages sound (81.9 kB read); no damage" in out


@pytest.mark.parametrize(
    ("where", "what"),
    [
        (lambda slot: slot + ROW_AT, "bad row"),
        (lambda slot: slot + ROW_AT + 4095, "bad row"),
        (lambda slot: slot + 192 + 4 * 16 + 3, "bad header"),  # a token
        (lambda slot: slot + 12, "bad header"),
        (lambda slot: slot + 4095, "bad header"),
    ],
    ids=["row", "row's last byte", "token", "size", "checksum"],
)
def test_one_flipped_bit(open_cache, saved, where, what):
    root, cache, tokens = saved
    bad = 6
    path, slot = slot_of(root, cache, tokens, bad)
    flip(path, where(slot))
    status, out, _ = kvstrata("verify", root)
    assert status == 1
    assert f"{path.name} slot {(slot - 8192) // 8192}: {what}, page " in out
    report = kvstrata("verify", root, "--json").json
    assert (report["sound"], report["corrupt"], report["left"], report["dropped"]) == (PAGES - 1, 1, 1, 0)
    ended = kvstrata("verify", root, "--repair")
    assert ended.status == 0
    assert "9 pages sound" in ended.out
    assert "1 bad page dropped" in ended.out
    assert kvstrata("verify", root, "--json").json["left"] == 0
    # What is left is served, and what was dropped is computed and saved again.
    again = open_cache(gpu=12, cpu=40, disk=root)
    assert serve(again, tokens).disk == bad * PAGE
    settle(again)
    assert again.stats()["corrupt"] == 0
    again.close()
    assert kvstrata("verify", root, "--json").json["sound"] == PAGES


def test_lost_records_and_header_blocks_are_made_again(open_cache, saved):
    root, _, tokens = saved
    first, second = segments(root)
    flip(first, 4096 + 2 * 128 + 50)
    flip(second, 30)
    report = kvstrata("verify", root, "--json").json
    assert (report["sound"], report["damaged_records"], report["left"]) == (6, 1, 2)
    report = kvstrata("verify", root, "--repair", "--json").json
    assert (report["sound"], report["recovered"], report["left"]) == (PAGES, 4, 0)
    assert kvstrata("verify", root, "--json").json["sound"] == PAGES
    assert serve(open_cache(gpu=12, cpu=40, disk=root), tokens).disk == (PAGES - 1) * PAGE


def test_a_file_cut_short(open_cache, saved):
    root, _, _ = saved
    first, _ = segments(root)
    os.truncate(first, 8192 + 4 * 8192 + 5000)
    report = kvstrata("verify", root, "--json").json
    assert (report["sound"], report["torn"], report["left"]) == (7, 3, 3)
    assert "cut short" in kvstrata("inspect", root).out
    assert kvstrata("verify", root, "--repair").status == 0
    assert kvstrata("verify", root).status == 0
    assert "cut short" not in kvstrata("inspect", root).out
    flip(first, 4096 + 6 * 128 + 50)  # the record of a slot that is not there
    assert kvstrata("verify", root).status == 0
    assert "damaged" not in kvstrata("inspect", root).out


def test_slots_and_files_in_each_others_place(saved):
    root, cache, tokens = saved
    path, slot = slot_of(root, cache, tokens, 1)
    other, second = slot_of(root, cache, tokens, 2)
    data = bytearray(path.read_bytes())
    assert other == path
    data[slot : slot + 8192], data[second : second + 8192] = data[second : second + 8192], data[slot : slot + 8192]
    path.write_bytes(data)
    report = kvstrata("verify", root, "--json").json
    assert [page["what"] for page in report["shelves"][0]["segments"][0]["bad"]] == ["header of another page"] * 2
    assert report["left"] == 2
    # A copy of a segment is as good as the segment.
    shutil.copy(segments(root)[1], segments(root)[1].with_name("seg-000009.kvs"))
    assert kvstrata("verify", root, "--json").json["sound"] == PAGES - 2 + 3


def test_damage_in_the_shelf_of_a_living_owner(open_cache, tmp_path):
    root = tmp_path / "disk"
    cache = open_cache(gpu=12, cpu=40, disk=root)
    tokens = fill_disk(cache, PAGES)
    path, slot = slot_of(root, cache, tokens, 3)
    flip(path, slot + ROW_AT + 77)
    before = snapshot(root)
    status, out, _ = kvstrata("verify", root, "--repair")
    assert status == 1
    assert "left to it" in out
    assert snapshot(root) == before


def test_any_layout_is_proven(open_cache, tmp_path):
    """Without its model: planes of unequal sizes, large and small pages, several models in one directory."""
    root = tmp_path / "disk"
    mla = [PlaneSpec(i, name, "bfloat16", (1, width)) for i in range(3) for name, width in (("latent", 40), ("rope", 6))]
    mixed = [
        PlaneSpec(0, "k", "float16", (2, 4)),
        PlaneSpec(0, "scale", "float32", (1, 1)),
        PlaneSpec(1, "k", "float16", (1, 3000)),
    ]
    pages = 0
    for specs, page_size, dtype in (
        (mla, 16, "bfloat16"),
        (mixed, 16, "float16"),
        (mixed, 256, "float16"),
        (mla, 1024, "bfloat16"),
    ):
        layout = PageLayout.from_planes(specs, page_size=page_size, dtype=dtype, tag="test")
        cache = open_cache(gpu=6, cpu=8, disk=root, disk_bytes=64 << 20, layout=layout, identity=tiny_identity(layout))
        tokens = prompt(4, seed=page_size, page_size=page_size)
        serve(cache, tokens)
        settle(cache)
        cache.close()
        pages += 4
        assert kvstrata("verify", root, "--json").json["sound"] == pages
    for path in segments(root):
        # The last byte of the last plane of a page.
        data = path.read_bytes()
        header_bytes, row_bytes, stride, slots_at = (int.from_bytes(data[at : at + size], "little") for at, size in FIELDS)
        slot = next(i for i in range(99) if data[4096 + 128 * i :].startswith(b"PAGE"))
        flip(path, slots_at + slot * (header_bytes + stride) + header_bytes + row_bytes - 1)
    report = kvstrata("verify", root, "--json").json
    assert (report["sound"], report["corrupt"]) == (pages - len(segments(root)), len(segments(root)))


def test_what_the_progress_function_raises_ends_it(saved):
    root, _, _ = saved
    calls = []

    def progress(done, total):
        calls.append((done, total))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        _core.verify(str(root), progress=progress)
    assert calls == [(n * 8192, PAGES * 8192) for n in (1, 2, 3)]
    report = _core.verify(str(root), progress=lambda done, total: done < 5 * 8192)
    assert report["cancelled"] is True
    assert report["bytes"] == 5 * 8192


def test_interrupted(tmp_path):
    """Ctrl-C while the core reads: it stops at the next look, and the command ends either way."""
    stop, ended = threading.Event(), []

    def read():
        _thread.interrupt_main()
        ended.append(stop.wait(30))

    with pytest.raises(KeyboardInterrupt):
        patiently(read, stop)
    assert ended == [True]
    with bar("reading", str, stop, quiet=True) as progress:
        assert progress(1, 2) is False
