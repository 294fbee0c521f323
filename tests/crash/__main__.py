"""python -m crash --loops 1000 [--seed 1]"""

import argparse
import logging
import os
import secrets
import sys
import time

# Before numpy and torch are imported: no thread may exist when the first writer is forked.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import torch._dynamo  # noqa: F401, E402 - imported by the first page pool otherwise, again in every fork

from crash.loops import Failed, run  # noqa: E402


def main() -> int:
    logging.getLogger("kvstrata").setLevel(logging.ERROR)  # of a full disk, again and again
    parser = argparse.ArgumentParser(prog="crash", description="kills writers and proves what they leave")
    parser.add_argument("--loops", type=int, default=50)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30), help="of the first directory")
    options = parser.parse_args()
    print(f"crash: {options.loops} loops from seed {options.seed}", flush=True)
    begun = time.monotonic()
    try:
        totals = run(options.loops, options.seed)
    except Failed as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        return 1
    print(
        f"crash: {options.loops} loops in {time.monotonic() - begun:.0f} s, nothing wrong: {totals.served} pages were served, all "
        f"exact; {totals.acknowledged} acknowledged ones were looked for, {totals.evicted} had been evicted"
    )
    assert min(totals) > 0 or options.loops < 50, f"nothing was tried: {totals}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
