"""B1: what was stored is found by the next process, every byte of it, and is not written again; also after kill -9."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from guest import Guest
from pages import prompt

PROMPTS, PAGES = 50, 10
CAP = 16 << 20

FIRST = """
import os, signal, sys
from guest import Guest
from pages import prompt
guest = Guest(sys.argv[1], int(sys.argv[2]))
for seed in range(int(sys.argv[3])):
    assert guest.serve(prompt(int(sys.argv[4]), seed)).saved == int(sys.argv[4])
    assert guest.cache.flush(60)
stored = guest.cache.stats()["disk"]["stored"]
print(stored, flush=True)
if sys.argv[5] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
assert guest.close()
"""


@pytest.mark.parametrize("end", ["close", "kill"])
def test_five_hundred_pages(tmp_path, end):
    root = tmp_path / "disk"
    first = subprocess.run(
        [sys.executable, "-c", FIRST, *map(str, (root, CAP, PROMPTS, PAGES, end))],
        env={"PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert first.returncode == (0 if end == "close" else -signal.SIGKILL), first.stderr
    assert int(first.stdout) == PROMPTS * PAGES, "pages reported as stored"

    guest = Guest(str(root), CAP)
    for _ in range(2):  # the second time most are out of RAM again
        for seed in range(PROMPTS):
            assert guest.serve(prompt(PAGES, seed)) == (PAGES, 0, 0)
            assert guest.cache.flush(60)
    disk = guest.cache.stats()["disk"]
    assert disk["adopted_pages"] == disk["pages"] == PROMPTS * PAGES
    assert disk["write_requests"] == disk["write_bytes"] == guest.cache.stats()["disk_writes"] == 0, "nothing is written twice"
    assert guest.close()
