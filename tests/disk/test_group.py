"""A directory that a group shares: its members read and take over each other's pages, others do not get in; never unasked."""

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import tiny_layout

from kvstrata._core import survey
from kvstrata.cache import Limits, PrefixCache

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")
ANN, BOB, EVE = 54001, 54002, 54003
GROUP = 54100

# What a member does: in a process that has imported everything as root, before it becomes somebody else.
MEMBER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
os.umask(0o077)
import numpy as np
from support import fingerprint, prompt, tiny_identity, tiny_layout
from kvstrata.cache import Limits, PrefixCache

root, user, group, shared, tenant = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "shared", sys.argv[6] or None
os.setgroups([group] if group else [])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
layout = tiny_layout()
try:
    cache = PrefixCache(layout, Limits(0, 16, root, 4 << 20, disk_group=shared), identity=tiny_identity(layout))
except (RuntimeError, OSError) as error:
    print(json.dumps({"refused": str(error)}))
    sys.exit()
tokens = prompt(4)
with cache.lease(tokens, leave=0, tenant=tenant) as lease:
    hit = lease.wait() // 16
    lease.save(hit, list(range(hit, 4)), 0)
    place = cache.slab
    for plan in cache.take_copies():
        import ctypes
        for row, block in zip(plan.slab, plan.blocks):
            page = fingerprint(layout, cache.namespace(tenant=tenant), tokens[: (block + 1) * 16])
            ctypes.memmove(place.address + int(row) * place.stride, page.ctypes.data, len(page))
        cache.copied(plan.ticket, True)
print(json.dumps({"hit": hit, "saved": cache.close(20)}))
"""


def member(root: Path, user: int, group: int = GROUP, shared: bool = True, tenant: str = "") -> dict[str, Any]:
    script = [sys.executable, "-c", MEMBER, str(Path(__file__).parents[1]), str(root), str(user), str(group)]
    ended = subprocess.run(
        [*script, "shared" if shared else "alone", tenant], capture_output=True, text=True, check=True, timeout=60
    )
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


@pytest.fixture
def root() -> Iterator[Path]:
    """An empty directory of the group, as an administrator makes it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o755)
        folder = Path(name) / "cache"
        folder.mkdir()
        os.chown(folder, -1, GROUP)
        os.chmod(folder, 0o2770)
        yield folder


def test_members_continue_from_each_other(root):
    assert member(root, ANN) == {"hit": 0, "saved": True}
    assert member(root, BOB) == {"hit": 4, "saved": True}
    assert member(root, ANN) == {"hit": 4, "saved": True}
    for path in [root, *root.rglob("*")]:
        found = path.lstat()
        assert found.st_gid == GROUP, path
        wanted = 0o2770 if path.is_dir() else 0o640 if path.name == "secret" else 0o660
        assert stat.S_IMODE(found.st_mode) == wanted, path
    assert survey(str(root))["shelves"]


def test_tenants_have_one_secret(root):
    assert member(root, ANN, tenant="acme")["hit"] == 0
    assert member(root, BOB, tenant="acme")["hit"] == 4
    assert member(root, BOB, tenant="other")["hit"] == 0


def test_others_are_refused(root):
    member(root, ANN)
    for shared in (True, False):
        answer = member(root, EVE, group=0, shared=shared)
        assert "disk_path" in answer["refused"]
        assert str(root) in answer["refused"]


def test_nobody_shares_without_saying_so(root):
    (root / "something").touch()
    answer = member(root, ANN, shared=False)
    assert f"disk_path {root}: belongs to user 0" in answer["refused"]
    os.chown(root, ANN, GROUP)
    answer = member(root, ANN, shared=False)
    assert "can be written by other users" in answer["refused"]
    assert "kvc2.disk_group" in answer["refused"]


def test_a_directory_that_is_not_shared(root):
    (root / "something").touch()
    for mode in (0o0770, 0o2777):
        os.chmod(root, mode)
        os.chown(root, ANN, GROUP)
        answer = member(root, ANN)
        assert "is not shared by its group 54100" in answer["refused"], oct(mode)
        assert "chmod 2770" in answer["refused"]


def test_the_option_is_off_by_default():
    assert not Limits(4).disk_group
    with pytest.raises(ValueError, match="disk_group"):
        PrefixCache(tiny_layout(), Limits(4, disk_group="yes"))
