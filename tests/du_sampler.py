"""Watches what a directory takes, from a process of its own: python du_sampler.py DIRECTORY SECONDS_BETWEEN, until its input ends.

Prints the number of samples and the most bytes that were allocated at once.
"""

import os
import select
import sys


def allocated(path: str) -> int:
    """Of everything below the path and of itself, as `du` counts."""
    try:
        total = os.lstat(path).st_blocks * 512
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                total += allocated(entry.path)
            else:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:  # went away meanwhile
        return 0
    return total


def main() -> None:
    root, pause = sys.argv[1], float(sys.argv[2])
    most = samples = 0
    while not select.select([sys.stdin], [], [], pause)[0]:
        most = max(most, allocated(root))
        samples += 1
    print(samples, max(most, allocated(root)))


if __name__ == "__main__":
    main()
