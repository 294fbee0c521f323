"""Processes that live at the same time on one directory: pages of others, fair shares, lowered limits, what the dead leave."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from du_sampler import allocated
from neighbours import Neighbour, Open, moving_in
from processes import watched
from support import until
from tool_kit import kvstrata, segments

MIB = 1 << 20


@pytest.fixture
def move_in(tmp_path: Path) -> Iterator[Open]:
    with moving_in(tmp_path / "disk") as move_in:
        yield move_in


def fill(neighbour: Neighbour, seed: int, prompts: int) -> None:
    for number in range(prompts):
        neighbour.serve(10, seed + number)


def test_who_lives_takes_over_what_a_killed_process_leaves(move_in: Open, tmp_path: Path) -> None:
    first, second = move_in(), move_in()
    first.serve(8, 1)
    until(lambda: second.disk["shared"] == 8, "the other's pages are known")
    first.serve(8, 2)
    first.kill()
    until(lambda: second.disk["pages"] == 16, "they are its own")
    assert second.disk["shared"] == 0
    assert second.disk["owners"] == 1
    assert second.serve(8, 1) == second.serve(8, 2) == 8
    second.serve(8, 3)
    assert second.disk["bytes"] == sum(path.stat().st_size for path in segments(tmp_path / "disk"))
    found = kvstrata("verify", tmp_path / "disk", "--json")
    assert found.status == 0, found.out
    assert found.json["sound"] == 24
    seen = kvstrata("inspect", tmp_path / "disk", "--json").json
    assert not seen["unknown"]


def test_a_process_that_ends_leaves_no_empty_shelf(move_in: Open, tmp_path: Path) -> None:
    first, second = move_in(), move_in()
    first.serve(2, 1)
    assert len(list((tmp_path / "disk/shelves").iterdir())) == 2
    assert second.tell("close")
    assert len(list((tmp_path / "disk/shelves").iterdir())) == 1
    until(lambda: first.disk["owners"] == 1, "the other has left")


def test_who_comes_later_gets_a_fair_share_and_the_limit_holds(move_in: Open, tmp_path: Path) -> None:
    cap = 2 * MIB
    first = move_in(cap)
    fill(first, 1000, 24)
    assert first.disk["bytes"] > cap * 3 // 4
    with watched(tmp_path / "disk") as found:
        second = move_in(cap)
        seeds = iter(range(5000, 1 << 30))

        def has_its_share() -> bool:
            second.serve(10, next(seeds))
            return bool(second.disk["bytes"] > cap * 0.35)

        until(has_its_share, "the second's share")
        assert first.disk["bytes"] <= cap * 0.65
        fill(first, 8000, 4)
        fill(second, 9000, 4)
    assert found[0].samples > 5
    assert found[0].most <= cap


def test_a_lowered_limit_is_acknowledged_by_who_lives(move_in: Open, tmp_path: Path) -> None:
    first = move_in(4 * MIB)
    fill(first, 1000, 40)
    assert allocated(tmp_path / "disk") > 3 * MIB
    second = move_in(MIB)
    # Within the second that it is waited for, where the first gets the processor in time; what it says holds at once either way.
    if second.opened["disk"]["unacknowledged"] == 0:
        assert allocated(tmp_path / "disk") <= MIB
    until(lambda: first.disk["cap_bytes"] == MIB, "it is acknowledged")
    assert second.opened["disk"]["cap_bytes"] == MIB
    assert allocated(tmp_path / "disk") <= MIB
    fill(first, 2000, 5)
    fill(second, 3000, 5)
    assert allocated(tmp_path / "disk") <= MIB
    second.kill()
    until(lambda: first.disk["cap_bytes"] == 4 * MIB, "it rules as long as its process lives")


def test_somebody_who_does_not_answer_is_not_waited_for(move_in: Open) -> None:
    first = move_in(4 * MIB)
    fill(first, 1000, 8)
    os.kill(first.process.pid, signal.SIGSTOP)
    second = move_in(MIB)
    assert second.opened["disk"]["unacknowledged"] == 1
    os.kill(first.process.pid, signal.SIGCONT)
    until(lambda: first.disk["cap_bytes"] == MIB, "it hears of it when it can")


def test_a_limit_that_others_do_not_keep_yet_is_logged(move_in: Open, open_cache: Any, tmp_path: Path, caplog: Any) -> None:
    first = move_in(4 * MIB)
    fill(first, 1000, 8)
    os.kill(first.process.pid, signal.SIGSTOP)
    open_cache(gpu=8, cpu=16, disk=tmp_path / "disk", disk_bytes=MIB)
    assert "1 other processes have not given back yet" in caplog.text
    os.kill(first.process.pid, signal.SIGCONT)
