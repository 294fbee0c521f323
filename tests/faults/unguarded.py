"""Whether tests fail without the line that keeps their fault from happening: they run in a process of their own, with a core that
leaves that line out and is built for this alone (`make guards`, core/guard.hpp)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[2] / "build" / "unguarded"


def unguarded_core() -> Path:
    found = list(BUILD.glob("_core*.so"))
    if not found:
        pytest.fail("the core without guards is not built: make guards")
    return found[0]


def run(guard: str, module: str, select: str) -> subprocess.CompletedProcess[str]:
    """The tests of `module` that `select` names, as pytest's -k does; without `guard`, or with all of them where it is ""."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=60", module, "-k", select]
    env = os.environ | {"KVSTRATA_TEST_CORE": str(unguarded_core())} | ({"KVSTRATA_UNGUARDED": guard} if guard else {})
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=BUILD.parents[1])


def assert_needed(guard: str, module: str, select: str) -> None:
    """The tests pass with the guard and do not without it: they fail, or the process dies of it."""
    with_it, without = run("", module, select), run(guard, module, select)
    assert with_it.returncode == 0, with_it.stdout[-3000:] + with_it.stderr[-1000:]
    assert without.returncode == 1 or without.returncode < 0, (
        f"without {guard}: exit status {without.returncode}\n{without.stdout[-3000:]}"
    )
