"""How fast pages come back from disk, against a plain sequential read of the same files: field case E7.

    .venv/bin/python benchmarks/reading.py [--megabytes 256] [--kilobytes 40] [--directory DIR] [--json]

Prompts of 128 pages, one after the other, each leased until its pages are in RAM, proven; the plain read makes one request of 2 MiB
after the other. Both go past the page cache where the file system can. Rounds of both are interleaved; the medians are compared.
"""

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from guest import Guest
from pages import prompt, tiny_layout

CHAIN = 128
ROUNDS = 5
REQUEST = 2 << 20


def plain(root: Path) -> float:
    """Seconds to read all segments."""
    buffer = mmap.mmap(-1, REQUEST)
    begun = time.perf_counter()
    for path in sorted(root.rglob("*.kvs")):
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            file = os.open(path, os.O_RDONLY)
        at = 0
        while got := os.preadv(file, [buffer], at):
            at += got
        os.close(file)
    return time.perf_counter() - begun


def through_cache(root: Path, cap: int, width: int, prompts: int) -> tuple[float, dict[str, int]]:
    """Seconds to have every prompt in RAM once, by a process that knows nothing yet; the counters of the disk tier."""
    guest = Guest(str(root), cap, cpu=3 * CHAIN, blocks=1, layout=tiny_layout(width=width), poison=False, load_deadline=60.0)
    tokens = [prompt(CHAIN, seed) for seed in range(prompts)]
    begun = time.perf_counter()
    for one in tokens:
        with guest.cache.lease(one, leave=0, must=True) as lease:
            if lease.wait() != len(one):
                raise SystemExit("a prompt is not there")
    seconds = time.perf_counter() - begun
    counters = guest.cache.stats()["disk"]
    guest.close()
    return seconds, counters


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--kilobytes", type=int, default=40, help="of a page, a multiple of 4")
    parser.add_argument("--directory", type=Path, help="on the file system to measure")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    width = options.kilobytes * 4  # a page has 256 bytes per unit of it
    prompts = max(1, options.megabytes * 1024 // (options.kilobytes * CHAIN))
    cap = 4 * options.megabytes << 20
    folder = Path(tempfile.mkdtemp(prefix="kvstrata-reading-", dir=options.directory))
    try:
        root = folder / "disk"
        guest = Guest(str(root), cap, cpu=3 * CHAIN, blocks=CHAIN, layout=tiny_layout(width=width), poison=False)
        for seed in range(prompts):
            guest.serve(prompt(CHAIN, seed))
            guest.cache.flush(60)
        guest.close()
        taken: dict[str, list[float]] = {"plain": [], "cache": []}
        for _ in range(ROUNDS):
            taken["plain"].append(plain(root) / sum(path.stat().st_size for path in root.rglob("*.kvs")))
            seconds, disk = through_cache(root, cap, width, prompts)
            taken["cache"].append(seconds / disk["read_bytes"])
    finally:
        shutil.rmtree(folder)
    speed = {name: 1e-6 / statistics.median(times) for name, times in taken.items()}
    found = {
        "plain_MB_s": round(speed["plain"]),
        "cache_MB_s": round(speed["cache"]),
        "ratio": round(speed["cache"] / speed["plain"], 2),
        "bytes_per_request": disk["read_bytes"] // disk["read_requests"],
    }
    if options.json:
        print(json.dumps(found))
    else:
        print(
            f"{found['cache_MB_s']:,} MB/s through the cache, {found['plain_MB_s']:,} MB/s plainly: {found['ratio']}; "
            f"{found['bytes_per_request']:,} bytes per request"
        )


if __name__ == "__main__":
    main()
