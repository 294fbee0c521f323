"""Several processes on one directory: workers (worker.py), and somebody who watches what the directory takes (du_sampler.py)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent


class Watched(NamedTuple):
    samples: int
    most: int  # bytes


def python(script: str, *arguments: object, environ: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    """A Python program of this folder."""
    return subprocess.Popen(
        [sys.executable, HERE / script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **(environ or {})},
    )


def outcome(process: "subprocess.Popen[str]", seconds: float = 300) -> str:
    """What it printed, when it has ended well."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err
    return out


@contextmanager
def watched(root: Path, every: float = 0.02) -> Iterator[list[Watched]]:
    """Fills the list, at the end, with what the directory took meanwhile."""
    found: list[Watched] = []
    sampler = python("du_sampler.py", root, every)
    try:
        yield found
    finally:
        found.append(Watched(*map(int, outcome(sampler).split())))


def work(root: Path, *, cap: int, workers: int, **options: object) -> list[dict[str, Any]]:
    """So many workers at once, from beginning to end; what each reports. Options: see worker.py."""
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    running = [python("worker.py", root, "--cap", cap, "--number", number, *words) for number in range(workers)]
    try:
        for step in ("ready", "open"):  # all have imported what they need: now they open together; and then they serve together
            for worker in running:
                assert worker.stdout is not None
                assert worker.stdout.readline() == f"{step}\n", worker.communicate()[1]
            for worker in running:
                assert worker.stdin is not None
                worker.stdin.write("go\n")
                worker.stdin.flush()
        return [json.loads(outcome(worker)) for worker in running]
    finally:
        for worker in running:
            worker.kill()
            worker.wait()
