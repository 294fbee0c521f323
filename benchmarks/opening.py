"""What it takes to start on a directory that holds a million pages: from the call of PrefixCache to the first answered lease.

    .venv/bin/python benchmarks/opening.py [--pages 1048576] [--cold] [--json]

Pages of 16 tokens; the tables are whole and sound, the slots of one prompt too, all others are holes, so that the directory takes
150 MB and not 8 GB. Guest mode: the lease is answered when its pages are in RAM, proven. `--cold`: the files are not in the page
cache. Memory is that of the process after the lease, and its high-water mark, beyond what it had before, the CPU tier included.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from disk_format import Shape
from million import CHAIN, Prompt, write_directory

from kvstrata.cache import Limits, PrefixCache
from kvstrata.identity import Fingerprint, Identity
from kvstrata.layout import PageLayout, PlaneSpec

SECONDS, MEMORY = 1.0, 200e6  # what it may take
PAGE = 16
CAP = 1 << 40
ROWS = CHAIN + 8  # of the CPU tier


def memory(field: str) -> int:
    """Bytes, of a field of /proc/self/status."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) * 1024


def at_rest(root: Path, cold: bool) -> None:
    """Nothing is left to be written: the first start makes small files safe, which would wait for everything else."""
    for path in root.rglob("*.kvs"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        if cold:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def measure(root: Path, pages: int, cold: bool) -> dict[str, object]:
    layout = PageLayout.from_planes(
        [PlaneSpec(layer, name, "float32", (2, 8)) for layer in range(2) for name in "kv"],
        page_size=PAGE,
        dtype="float32",
        tag="benchmark",
    )
    identity = Identity.of({"model_type": "benchmark"}, layout, Fingerprint("full", bytes(32)))
    dice = np.random.default_rng(3)
    tokens = dice.integers(0, 30000, CHAIN * PAGE, np.int32)
    prompt = Prompt(tokens, [dice.bytes(layout.row_bytes) for _ in range(CHAIN)])
    shape = Shape(PAGE, tuple(plane.bytes for plane in layout.planes))
    write_directory(root, shape, identity.namespace(), pages, [prompt])
    at_rest(root, cold)

    before = memory("VmRSS")
    begun, used = time.perf_counter(), time.process_time()
    cache = PrefixCache(layout, Limits(0, ROWS, str(root), CAP), identity=identity)
    opened = time.perf_counter()
    lease = cache.lease(tokens, must=True)
    hit = lease.wait(60)
    answered = time.perf_counter()
    found = {
        "pages": cache.stats()["disk"]["pages"],
        "hit_tokens": hit,
        "open_s": round(opened - begun, 3),
        "answered_s": round(answered - begun, 3),
        "cpu_s": round(time.process_time() - used, 3),  # of all threads: what is left on a busy machine
        "share_of_the_second": round((answered - begun) / SECONDS, 2),
        "memory_bytes": memory("VmRSS") - before,
        "peak_bytes": memory("VmHWM") - before,
        "share_of_the_memory": round((memory("VmRSS") - before) / MEMORY, 2),
    }
    lease.release()
    found["lease_us"] = lease_microseconds(cache, tokens)
    cache.close()
    return found


def lease_microseconds(cache: PrefixCache, known: np.ndarray) -> dict[str, float]:
    """What the serving thread pays for a lookup and its end: of a new prompt of the same length, and of the one that is known."""
    dice = np.random.default_rng(4)
    times: dict[str, list[float]] = {"new": [], "known": []}
    for _ in range(1000):
        for kind, tokens in (("new", dice.integers(0, 30000, len(known), np.int32)), ("known", known)):
            begun = time.perf_counter()
            cache.lease(tokens, must=True).release()
            times[kind].append(1e6 * (time.perf_counter() - begun))
    return {f"{kind}_p{share}": round(float(np.percentile(all_, share)), 1) for kind, all_ in times.items() for share in (50, 99)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pages", type=int, default=1 << 20)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="kvstrata-opening-"))
    try:
        found = measure(root / "disk", options.pages, options.cold)
    finally:
        shutil.rmtree(root)
    if options.json:
        print(json.dumps(found))
        return
    print(
        f"{found['pages']:,} pages: open in {found['open_s']} s, a lease of {found['hit_tokens']:,} tokens answered after "
        f"{found['answered_s']} s ({found['share_of_the_second']} of what it may take), {found['cpu_s']} s of CPU time"
    )
    print(
        f"memory: {found['memory_bytes']:,} bytes ({found['share_of_the_memory']} of what it may take), "
        f"{found['peak_bytes']:,} at the most"
    )
    print(f"a lease and its release, in microseconds: {found['lease_us']}")


if __name__ == "__main__":
    main()
