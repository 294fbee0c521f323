"""S3: the disk layer keeps pages under `disk_path`, over restarts, for independent calls and processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from neighbours import Open, moving_in
from support import until


@pytest.fixture
def move_in(tmp_path: Path) -> Iterator[Open]:
    """move_in(): a process whose disk_path is tmp_path / "disk"."""
    with moving_in(tmp_path / "disk") as move_in:
        yield move_in


def test_stop_start_hit(move_in: Open, tmp_path: Path) -> None:
    first = move_in()
    assert first.serve(10, 1) == 0
    assert first.close()
    assert any(path.stat().st_size > 10 * 4096 for path in (tmp_path / "disk").rglob("*.kvs"))
    second = move_in()
    assert second.serve(10, 1) == 10
    assert second.disk["write_requests"] == 0  # it is there already
    assert second.serve(10, 2) == 0
    second.kill()  # does not get to close anything
    third = move_in()
    assert (third.serve(10, 1), third.serve(10, 2)) == (10, 10)


def test_more_than_ram_holds_comes_back_after_a_restart(move_in: Open) -> None:
    first = move_in(16 << 20)
    for seed in range(12):
        first.serve(10, seed)  # 120 pages; its CPU tier has 24
    assert first.close()
    second = move_in(16 << 20)
    assert [second.serve(10, seed) for seed in range(12)] == [10] * 12


def test_each_finds_what_the_other_writes_and_nobody_writes_it_twice(move_in: Open) -> None:
    """Two live processes, one directory."""
    first, second = move_in(), move_in()
    assert second.opened["disk"]["owners"] == 2
    first.serve(8, 1)
    until(lambda: second.disk["shared"] == 8, "the other's pages are known")
    assert second.serve(8, 1) == 8
    assert second.serve(10, 2) == 0
    until(lambda: first.disk["shared"] == 10, "and back")
    assert first.serve(10, 2) == 10
    assert (first.disk["pages"], second.disk["pages"]) == (8, 10)
    third = move_in()
    assert third.opened["disk"]["shared"] == 18, "who comes later knows them at once"
    assert third.serve(8, 1) == 8
    assert third.disk["pages"] == 0
