"""D7: several processes read and write the same prompts in one directory, and are started again: no wrong byte, nothing lost."""

import os

import disk_format
import pytest
from pages import PAGE, tiny_layout
from processes import watched, work

from kvstrata import _core

SECONDS = float(os.environ.get("KVSTRATA_SHARING_SECONDS", "2"))  # of each of three rounds; 20 make the minute of the case
PROMPTS = 300  # of 3 to 8 pages
SHAPE = disk_format.Shape(PAGE, tuple(plane.bytes for plane in tiny_layout().planes))


@pytest.mark.parametrize(("cap", "evicts"), [(64 << 20, False), (1 << 20, True)], ids=["room for all", "evicting"])
def test_the_same_prompts_in_four_processes(tmp_path, cap, evicts):
    root = tmp_path / "disk"
    durable: set[str] = set()
    with watched(root) as found:
        for number in range(3):
            reports = work(root, cap=cap, workers=4, seconds=SECONDS, prompts=PROMPTS, round=number)
            for report in reports:
                assert report["wrong"] == report["corrupt"] == report["unreadable"] == 0
                assert report["requests"] > 0
                assert report["closed"]
                durable |= set(report["on_disk"])
                # Nobody had left anything at first, so what one finds without having computed it came from those who live
                # beside. Who got little done may have been too early for that.
                assert number > 0 or evicts or report["of_others"] > 0 or report["requests"] < 2 * PROMPTS, "each sees the others"
            assert number > 0 or evicts or sum(report["of_others"] for report in reports) > 0
            in_tables = {page.record.key.hex() for segment in disk_format.read_directory(root, SHAPE) for page in segment.pages}
            assert in_tables
            if not evicts:
                assert durable <= in_tables, "pages that were stored and never removed"
                assert number == 0 or sum(report["disk"]["used"] for report in reports) > 0, "what earlier rounds left is used"
    assert found[0].most <= cap
    proofs = [segment for shelf in _core.verify(str(root))["shelves"] for segment in shelf["segments"]]
    assert sum(proof["sound"] for proof in proofs) >= len(in_tables)
    assert sum(proof["left"] for proof in proofs) == 0
