"""The simulation of the production driver sees what happens without any one of its guards, within a thousand seeds."""

import os
import subprocess

import pytest
from unguarded import BUILD

pytestmark = pytest.mark.guards

GUARDS = [
    "publish_after_place",
    "completion_generation",
    "pins",
    "copy_holds",
    "leaf_first",
    "reserve_before_write",
    "join_moves",
    "first_writer",
    "deadline",
    "name_space",
    "release_on_cancel",
    "ready_fence",
    "no_cpu_tier",
    "failed_write",
    "found_slots",
    "written_once",
]


def simulate(guard: str, seeds: int) -> subprocess.CompletedProcess[str]:
    command = [BUILD / "core_tests", "-tc=simulation: every promise*"]
    env = os.environ | {"KVSTRATA_SEEDS": str(seeds)} | ({"KVSTRATA_UNGUARDED": guard} if guard else {})
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


def test_with_all_of_them():
    run = simulate("", 100)
    assert run.returncode == 0, run.stdout[-3000:]


@pytest.mark.parametrize("guard", GUARDS)
def test_without_one(guard):
    run = simulate(guard, 1000)
    assert run.returncode != 0, f"1,000 seeds do not miss {guard}"
    assert "seed " in run.stdout or run.returncode < 0, run.stdout[-2000:]


def test_a_name_that_is_no_guard_is_refused():
    run = simulate("pin", 1)
    assert run.returncode != 0
    assert "no such guard" in run.stderr
