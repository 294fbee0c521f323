"""Damaged tables of a large directory: what is known is served at once, what was lost is found again in the background."""

import numpy as np
import pytest
from disk_format import BLOCK, RECORD_BYTES, Shape
from guest import Guest
from million import CHAIN, Prompt, write_directory
from pages import PAGE, fingerprint, tiny_identity, tiny_layout
from support import until

SLOTS = 8192
PAGES = 4 * SLOTS
LAYOUT = tiny_layout()
SPACE = tiny_identity(LAYOUT).namespace()
SHAPE = Shape(PAGE, tuple(plane.bytes for plane in LAYOUT.planes))


def whole_prompt(seed: int) -> Prompt:
    tokens = np.random.default_rng(seed).integers(0, 30000, CHAIN * PAGE, np.int32)
    rows = [fingerprint(LAYOUT, SPACE, tokens[: (page + 1) * PAGE]).tobytes() for page in range(CHAIN)]
    return Prompt(tokens, rows)


@pytest.fixture
def directory(tmp_path):
    """(root, a prompt in the second segment, one in the third): four segments full of pages."""
    here, there = whole_prompt(1), whole_prompt(2)
    # Around the place where the third segment begins: the first goes to the end of the second.
    write_directory(tmp_path / "disk", SHAPE, SPACE, PAGES, [here, there], first=2 * SLOTS - CHAIN, slots=SLOTS)
    return tmp_path / "disk", here.tokens, there.tokens


def harm(root, segment: int, offset: int, size: int) -> None:
    (path,) = root.glob(f"shelves/*/seg-{segment:06}.kvs")
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(size))


@pytest.mark.parametrize(
    ("offset", "size", "found"),
    [
        (0, BLOCK, CHAIN),
        (BLOCK, SLOTS * RECORD_BYTES, CHAIN),
        (BLOCK + (SLOTS - CHAIN) * RECORD_BYTES, BLOCK, BLOCK // RECORD_BYTES),
        (0, BLOCK + SLOTS * RECORD_BYTES, CHAIN),
    ],
)
def test_one_segment_lost_its_table(directory, offset, size, found):
    """Its header block, its records, some of them, or all of it: zeros, as after a power loss."""
    root, here, there = directory
    harm(root, 2, offset, size)
    guest = Guest(str(root), 1 << 40, cpu=2 * CHAIN, blocks=CHAIN, load_deadline=30.0)
    assert guest.cache.stats()["disk"]["pages"] >= 3 * SLOTS
    assert guest.serve(there) == (CHAIN, 0, 0), "of a segment that is sound"
    until(lambda: guest.cache.stats()["disk"]["rebuilt_pages"] == found, "the prompt's pages to be found")
    until(lambda: not guest.cache.stats()["disk"]["unproven_slots"], "all slots to be looked at")
    disk = guest.cache.stats()["disk"]
    assert disk["damaged_segments"] + disk["damaged_records"] > 0
    assert guest.serve(here) == (CHAIN, 0, 0), "of the one that was rebuilt"
    guest.cache.check_integrity()
    assert guest.close()
    again = Guest(str(root), 1 << 40, cpu=2 * CHAIN, blocks=CHAIN)
    assert again.cache.stats()["disk"]["damaged_records"] == again.cache.stats()["disk"]["damaged_segments"] == 0
    assert again.serve(here) == (CHAIN, 0, 0)
    assert again.close()
