"""A forked child that lives on: the directory is the parent's alone, and free when the parent has ended, however it ended."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PARENT = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
from support import prompt, serve, settle, tiny_identity, tiny_layout
from kvstrata.cache import Limits, PrefixCache

layout = tiny_layout()
cache = PrefixCache(layout, Limits(8, 16, sys.argv[2], 4 << 20), identity=tiny_identity(layout))
serve(cache, prompt(4))
settle(cache)
child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(600)
    os._exit(0)
if sys.argv[3] == "closed":
    assert cache.close(20)
print(json.dumps(child), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_the_child_owns_nothing(open_cache, tmp_path, how):
    from support import PAGE, prompt, serve

    root = tmp_path / "disk"
    here = str(Path(__file__).parents[1])
    ended = subprocess.run([sys.executable, "-c", PARENT, here, str(root), how], stdout=subprocess.PIPE, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    child = json.loads(ended.stdout)
    try:
        os.kill(child, 0)  # it lives
        cache = open_cache(gpu=8, cpu=16, disk=root)
        assert serve(cache, prompt(4)).disk == 3 * PAGE
        assert len(list((root / "shelves").iterdir())) == 1
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_parent_keeps_what_it_has(open_cache, tmp_path):
    """A child that ends, closes nothing of its parent's."""
    from support import PAGE, prompt, serve, settle

    from kvstrata._core import survey

    root = tmp_path / "disk"
    cache = open_cache(gpu=8, cpu=16, disk=root)
    serve(cache, prompt(4))
    settle(cache)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert [shelf["alive"] for shelf in survey(str(root))["shelves"]] == [True]
    assert serve(cache, prompt(4)).hit == 3 * PAGE
    serve(cache, prompt(4, seed=1))
    settle(cache)
    assert cache.stats()["disk"]["pages"] == 8
