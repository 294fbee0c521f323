"""C2: four processes, one directory, one limit. Blocks are counted, not payload; what the file system has free changes nothing."""

import pytest
from disk_format import round_up
from pages import PAGE
from processes import watched, work

CAP = 20_000_000
WIDTHS = (64, 62)  # a page of 16,384 bytes, and one whose row ends inside a block


@pytest.mark.parametrize("width", WIDTHS)
def test_four_writers(tmp_path, width):
    """Ten times the limit is offered, beside the files of an earlier run."""
    root = tmp_path / "disk"
    row = round_up(PAGE * width * 16)
    (earlier,) = work(root, cap=CAP, workers=1, pages=300, width=width)
    assert earlier["closed"]
    with watched(root) as found:
        reports = work(root, cap=CAP, workers=4, pages=10 * CAP // row // 4, width=width, round=1)
    (seen,) = found
    assert seen.samples > 20
    assert CAP // 2 < seen.most <= CAP, f"{seen.most:,} bytes at once"
    for report in reports:
        assert report["wrong"] == report["corrupt"] == report["unreadable"] == 0
        assert report["closed"]
    assert sum(report["disk"]["stored"] for report in reports) * row > 2 * CAP, "much of it was written"
