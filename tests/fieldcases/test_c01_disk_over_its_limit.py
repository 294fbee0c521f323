"""C1: the disk tier never takes more than it may, counted by the blocks that everything in its directory has, at every moment."""

from guest import Guest
from pages import prompt, tiny_layout
from processes import watched

CAP = 100_000_000
OFFERED = 10 * CAP
PAGE_BYTES = 1 << 16


def test_ten_times_the_limit_in_three_sessions(tmp_path):
    root = tmp_path / "disk"
    root.mkdir(mode=0o700)
    (root / "left by somebody else").write_bytes(bytes(5_000_000))  # counts as well
    layout = tiny_layout(width=256)
    assert layout.row_bytes == PAGE_BYTES
    seeds = iter(range(1 << 30))
    with watched(root) as found:
        for session in range(3):
            guest = Guest(str(root), CAP, cpu=96, blocks=16, layout=layout)
            written = 0
            while written < OFFERED // PAGE_BYTES // 3:
                written += guest.serve(prompt(16, next(seeds))).saved
                guest.cache.flush(60)
            stats = guest.cache.stats()
            assert stats["disk"]["stored"] > 0.9 * OFFERED / PAGE_BYTES / 3
            assert stats["disk"]["evicted"] > 0
            assert session == 0 or stats["disk"]["pages"] > 0.7 * CAP / PAGE_BYTES, "the limit is also used"
            assert guest.close()
    (seen,) = found
    assert seen.samples > 20
    assert seen.most <= CAP, f"{seen.most:,} bytes at once"

    for cap in (CAP // 2, CAP // 8):  # lowered: holds before the cache is there
        guest = Guest(str(root), cap, layout=layout)
        with watched(root) as found:
            assert guest.serve(prompt(16, 1 << 30)).wrong == 0
            assert guest.close()
        assert found[0].most <= cap
