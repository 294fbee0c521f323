"""B3: kill -9 at random moments, while writing, evicting, opening and closing. The loops of `make crash` do it: tests/crash."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
LOOPS = int(os.environ.get("KVSTRATA_CRASH_LOOPS", "50"))


def test_killed_at_random_instants():
    """Every page found is exact, nothing counts that is not there, the limit holds; prints the seed when not."""
    ended = subprocess.run(  # a process of its own, since this one has threads
        [sys.executable, "-m", "crash", "--loops", str(LOOPS)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{LOOPS} loops in" in ended.stdout
