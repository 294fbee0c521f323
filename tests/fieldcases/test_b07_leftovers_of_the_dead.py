"""B7: started, killed, started again, twenty times: every start succeeds, and what the dead left is taken over or gone."""

import os
import signal
from pathlib import Path

from neighbours import Neighbour
from support import until
from tool_kit import kvstrata

from kvstrata._core import survey

ROUNDS = 20
CAP = 2 << 20


def everything(root: Path) -> set[Path]:
    return {path.relative_to(root) for path in root.rglob("*")}


def test_twenty_kills(tmp_path):
    root = tmp_path / "cache"
    survivor = Neighbour(root, CAP)
    survivor.serve(6, 1)
    own = everything(root)
    pages = 0
    for number in range(ROUNDS):
        victim = Neighbour(root, CAP)
        assert victim.serve(6, 1) == 6, "the living process's pages are there"
        victim.tell("serve", 4, 100 + number)
        victim.process.send_signal(signal.SIGKILL)  # while it writes
        victim.process.communicate()
    # It looks round once a second, and may not have noticed yet that the last of them ever lived.
    until(lambda: all(shelf["alive"] for shelf in survey(str(root))["shelves"]), "every shelf is the survivor's")
    until(lambda: survivor.disk["owners"] == 1, "nobody else lives")
    until(lambda: survivor.disk["shared"] == 0, "what they left is the survivor's")
    until(lambda: not survivor.disk["unproven_slots"], "and was looked at")
    assert own <= everything(root), "the files of who lived all the time are untouched"
    assert survivor.serve(6, 1) == 6
    pages = survivor.disk["pages"]
    assert survivor.tell("close")
    assert not [name for name in os.listdir("/dev/shm") if "kvstrata" in name]  # of others there may be anything
    names = {path.name for path in root.rglob("*") if path.is_file()}
    assert {name for name in names if not name.endswith((".kvs", ".json"))} <= {"lock", "owner", "changes", "secret"}

    heir = Neighbour(root, CAP)
    assert heir.opened["disk"]["pages"] == pages
    assert heir.tell("close")
    shelves = list((root / "shelves").iterdir())
    assert all(list(shelf.glob("*.kvs")) for shelf in shelves), "no shelf of a dead process is left without a segment"
    found = kvstrata("verify", root, "--json")
    assert found.status == 0, found.out
    assert found.json["sound"] == pages
