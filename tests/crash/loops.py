"""Forking, killing at random instants, and telling what went wrong."""

import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from crash.harm import harm
from crash.heir import inherit
from crash.scene import Scene
from crash.writer import REPORT_BYTES, STORED, write_until_killed

LIVES = 10  # of a directory
LONGEST = 0.6  # seconds of a writer's life
PATIENCE = 120.0  # seconds for an heir
SOUND = "sound"  # an heir that found nothing wrong, and how many pages it was served


class Failed(AssertionError):
    """A loop found something; the text says what, and how to do it again."""


class Totals(NamedTuple):
    """Over all lives. `acknowledged`: pages that had to be there."""

    acknowledged: int = 0
    served: int = 0
    evicted: int = 0


class Child(NamedTuple):
    pid: int
    pipe: int  # what it tells


def fork(work: Callable[[int], None]) -> Child:
    """A child that does `work(pipe)` and ends."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Child(pid, reading)
    status = 3
    try:
        os.close(reading)
        work(writing)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def listen(child: Child, seconds: float) -> bytes:
    """What the child told within some seconds, or until it ended."""
    end, told = time.monotonic() + seconds, b""
    while (left := end - time.monotonic()) > 0:
        if select.select([child.pipe], [], [], left)[0]:
            piece = os.read(child.pipe, 1 << 16)
            if not piece:
                break
            told += piece
    return told


def end(child: Child) -> tuple[int, bytes]:
    """Kills the child; its exit status, and the rest of what it told."""
    os.kill(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    told = b""
    while piece := os.read(child.pipe, 1 << 16):
        told += piece
    os.close(child.pipe)
    return status, told


def instants(scene: Scene) -> list[float]:
    """When each writer is killed: short lives, which end while opening, as often as long ones."""
    dice = random.Random(f"{scene.seed} {scene.life} kills")
    return [dice.choice([0.02, 0.1, LONGEST]) * dice.random() for _ in range(scene.writers)]


def one_life(scene: Scene, acknowledged: set[bytes]) -> Totals:
    """Writers live and are killed, one after the other; then everything is proven. Raises Failed."""
    evicted = 0
    writers = [fork(lambda pipe, number=number: write_until_killed(scene, number, pipe)) for number in range(scene.writers)]
    told = []
    for writer, seconds in zip(writers, instants(scene), strict=True):
        heard = listen(writer, seconds)
        status, rest = end(writer)
        told.append(heard + rest)
        if status != signal.SIGKILL:
            raise Failed(f"a writer ended by itself, with status {status}")
    for report in told:
        for at in range(0, len(report) - REPORT_BYTES + 1, REPORT_BYTES):
            sign, key = report[at : at + 1], report[at + 1 : at + REPORT_BYTES]
            evicted += sign != STORED
            (acknowledged.add if sign == STORED else acknowledged.discard)(key)

    if scene.harmed:
        harm(scene.root, random.Random(f"{scene.seed} {scene.life} harm"))

    def prove(pipe: int) -> None:
        served, faults = inherit(scene, acknowledged)
        os.write(pipe, "\n".join(faults).encode()[: 1 << 15] or f"{SOUND} {served}".encode())

    heir = fork(prove)
    heard = listen(heir, PATIENCE)
    _, rest = end(heir)
    verdict = (heard + rest).decode() or "the heir did not come to an end"
    if not verdict.startswith(SOUND):
        raise Failed(verdict)
    return Totals(len(acknowledged) if scene.roomy else 0, int(verdict.split()[1]), evicted)


def run(loops: int, seed: int) -> Totals:
    """So many lives, in directories of some lives each. Raises Failed."""
    tasks = len(os.listdir("/proc/self/task"))
    assert tasks == 1, f"{tasks} threads: a fork would lose some"
    totals = Totals()
    for first in range(0, loops, LIVES):
        root = Path(tempfile.mkdtemp(prefix="kvstrata-crash-"))
        acknowledged: set[bytes] = set()
        for life in range(min(LIVES, loops - first)):
            scene = Scene(root / "disk", seed + first // LIVES, life)
            try:
                one = one_life(scene, acknowledged)
            except Failed as failure:
                raise Failed(
                    f"loop {first + life + 1} of {loops}, life {life} of the directory with seed {scene.seed}:\n{failure}\n"
                    f"the directory is kept: {scene.root}\nagain: make crash LOOPS={LIVES} SEED={scene.seed}"
                ) from None
            totals = Totals(*(sum(pair) for pair in zip(totals, one, strict=True)))
        shutil.rmtree(root)
    return totals
