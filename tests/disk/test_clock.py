"""A wall clock that goes back: deadlines, waits and retries do not notice, and pages are found whatever time their records name."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import disk_format
import pytest
from guest import Guest
from pages import PAGE, prompt, tiny_layout

SHAPE = disk_format.Shape(PAGE, tuple(plane.bytes for plane in tiny_layout().planes))
TESTS = Path(__file__).parent.parent

# Loaded before the C library: the time of day is START at first and an hour less at each further look.
BACKWARDS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
static _Atomic long looks;
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*really)(clockid_t, struct timespec *);
    if (!really) really = dlsym(RTLD_NEXT, "clock_gettime");
    int result = really(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec = atol(getenv("START")) - 3600 * looks++;
    return result;
}
"""

LIFE = """
import sys, time
from guest import Guest
from pages import prompt
first, second = time.time(), time.time()
assert second < first, "the clock does not go back"
for life in range(2):
    guest = Guest(sys.argv[1], 1 << 20, load_deadline=5.0, retry_after=0.05)
    for seed in range(30):
        answer = guest.serve(prompt(6, seed))
        assert not answer.wrong
        assert guest.cache.flush(30)
        assert guest.serve(prompt(6, seed)).hit == 6
    stats = guest.cache.stats()
    assert stats["timeouts"] == stats["corrupt"] == stats["spills_dropped"] == 0, stats
    assert stats["disk"]["health"] == "ok"
    assert stats["disk"]["evicted"] > 0
    guest.cache.check_integrity()
    assert guest.close()
print(guest.cache.stats()["disk"]["adopted_pages"])
"""


@pytest.fixture
def backwards(tmp_path):
    """backwards(root, start): a life of a cache in a process whose clock goes back; the pages it had adopted in the end."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "clock.c").write_text(BACKWARDS)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "clock.so", tmp_path / "clock.c", "-ldl"], check=True)

    def live(root: Path, start: int) -> int:
        ended = subprocess.run(
            [sys.executable, "-c", LIFE, root],
            env={**os.environ, "LD_PRELOAD": str(tmp_path / "clock.so"), "START": str(start), "PYTHONPATH": str(TESTS)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr
        return int(ended.stdout)

    return live


def test_the_clock_goes_back_while_serving_and_between_starts(tmp_path, backwards):
    root = tmp_path / "disk"
    today = int(time.time())
    for start in (today, today - 86400 * 300, today + 86400 * 300):
        assert backwards(root, start) > 50
    times = [page.record.last_use for segment in disk_format.read_directory(root, SHAPE) for page in segment.pages]
    assert max(times) > today + 86400 * 100
    guest = Guest(str(root), 1 << 20)  # and now it is right again: records of the future are as good as any
    assert guest.cache.stats()["disk"]["pages"] == len(times)
    for seed in range(30):
        assert guest.serve(prompt(6, seed)).wrong == 0
        guest.cache.flush(30)
    for seed in range(100, 140):
        guest.serve(prompt(6, seed))
        guest.cache.flush(30)
    assert guest.serve(prompt(6, 139)).hit == 6
    assert guest.cache.stats()["disk"]["evicted"] > 100
    assert guest.close()
    guest = Guest(str(root), 1 << 20)
    assert guest.serve(prompt(6, 139)) == (6, 0, 0), "what was stored last is kept"
    assert guest.close()
