"""E7: adjacent pages go to and from the disk in large requests, and each page is copied once between disk and engine."""

from guest import Guest
from pages import prompt, tiny_layout

LAYOUT = tiny_layout(width=160)
CHAIN = 128  # pages of a prompt
PROMPTS = 50  # 250 MiB in all
KIB = 1024


def open_guest(root) -> Guest:
    return Guest(str(root), 1 << 30, cpu=3 * CHAIN, blocks=CHAIN, layout=LAYOUT, load_deadline=60.0)


def test_reading_256_megabytes_of_40_kilobyte_pages(tmp_path):
    assert LAYOUT.row_bytes == 40 * KIB
    root = tmp_path / "disk"
    guest = open_guest(root)
    for seed in range(PROMPTS):
        assert guest.serve(prompt(CHAIN, seed)).saved == CHAIN
        assert guest.cache.flush(60)
    disk = guest.cache.stats()["disk"]
    assert disk["write_pages"] == disk["stored"] == CHAIN * PROMPTS
    assert disk["write_bytes"] / disk["write_requests"] >= 256 * KIB
    assert guest.close()

    guest = open_guest(root)
    for seed in range(PROMPTS):
        assert guest.serve(prompt(CHAIN, seed)) == (CHAIN, 0, 0)
    disk = guest.cache.stats()["disk"]
    assert disk["read_pages"] == disk["loaded"] == CHAIN * PROMPTS, "each page is read once"
    assert disk["read_bytes"] >= CHAIN * PROMPTS * LAYOUT.row_bytes
    assert disk["read_bytes"] / disk["read_requests"] >= 256 * KIB
    assert guest.loaded == CHAIN * PROMPTS, "and copied once, straight to where the engine wants it"
    assert guest.close()
