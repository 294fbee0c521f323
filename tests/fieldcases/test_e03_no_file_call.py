"""E3: the serving thread makes no file call, whatever the disk does; moves need no help from Python; what came is seen at once."""

import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from disk_format import Shape
from file_systems import MIB, ext4
from guest import Guest
from million import CHAIN, Prompt, write_directory
from pages import PAGE, prompt, tiny_identity, tiny_layout
from support import ByHand, until

PAGES = 1 << 20
LAYOUT = tiny_layout()
SPACE = tiny_identity(LAYOUT).namespace()

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")


class FileCalls:
    """What this thread read and wrote by system calls, counted by the kernel."""

    def __init__(self) -> None:
        self._path = f"/proc/self/task/{threading.get_native_id()}/io"
        first = self._now()
        self._own = [after - before for before, after in zip(first, self._now(), strict=True)]  # of looking, once
        self._begin = self._now()

    def _now(self) -> list[int]:
        with open(self._path) as file:
            return [int(line.split()[1]) for line in file][:4]  # rchar, wchar, syscr, syscw

    def made(self) -> list[int]:
        found = [now - begin - own for now, begin, own in zip(self._now(), self._begin, self._own, strict=True)]
        return found[2:]


def test_the_count_counts(tmp_path):
    calls = FileCalls()
    assert calls.made() == [0, 0]
    (tmp_path / "file").write_bytes(b"1")
    assert calls.made()[1] >= 1


@pytest.fixture
def slow_disk(tmp_path):
    """(directory, stall, go_on): a file system that takes no writes between the two calls."""
    with ext4(tmp_path / "slow", 512 * MIB) as at:
        frozen = []

        def freeze(option: str) -> None:
            ended = subprocess.run(["fsfreeze", option, at], capture_output=True, text=True)
            if ended.returncode != 0:
                pytest.skip(f"cannot freeze a file system: {ended.stderr.strip()}")

        def stall() -> None:
            freeze("-f")
            frozen.append(True)

        def go_on() -> None:
            frozen.clear()
            freeze("-u")

        try:
            yield at / "disk", stall, go_on
        finally:
            if frozen:
                go_on()


def test_a_million_pages_and_a_stalled_disk(slow_disk):
    root, stall, go_on = slow_disk
    dice = np.random.default_rng(3)
    known = dice.integers(0, 30000, CHAIN * PAGE, np.int32)
    shape = Shape(PAGE, tuple(plane.bytes for plane in LAYOUT.planes))
    write_directory(root, shape, SPACE, PAGES, [Prompt(known, [dice.bytes(LAYOUT.row_bytes) for _ in range(CHAIN)])])
    guest = Guest(str(root), 1 << 40, cpu=CHAIN + 64, blocks=CHAIN, write_deadline=0.2, load_deadline=0.2, retry_after=0.1)
    cache = guest.cache
    assert cache.stats()["disk"]["pages"] == PAGES
    assert guest.serve(prompt(6, 1)).saved == 6
    cache.flush(30)
    stall()
    calls = FileCalls()
    held = []
    for seed in range(300):
        with cache.lease(prompt(6, 100 + seed), must=True) as lease:
            assert lease.wait() == lease.hit == 0
            lease.save(0, np.arange(6, dtype=np.int32), 0)
            assert lease.ready
        if seed % 100 == 0:  # from disk, and it may not come
            held.append(cache.lease(known[: (1 + seed // 100) * 8 * PAGE], must=True))
        for lease in held:
            assert lease.ready in (True, False)
        cache.stats()
    for lease in held:
        lease.release()
    assert calls.made() == [0, 0]
    go_on()
    before, seeds = cache.stats()["disk_writes"], iter(range(5000, 1 << 30))
    until(lambda: guest.serve(prompt(6, next(seeds))) and cache.stats()["disk_writes"] > before, "writing to resume")
    cache.flush(30)
    cache.check_integrity()
    assert guest.close()


def test_writes_go_on_beside_a_busy_interpreter(slow_disk):
    """No thread of the disk tier needs the interpreter: a loop that keeps it does not keep them."""
    root, stall, go_on = slow_disk
    layout = tiny_layout(width=512)  # 128 KiB a page
    guest = Guest(str(root), 256 * MIB, cpu=1650, blocks=16, layout=layout, write_deadline=60.0)
    stall()
    pages = sum(guest.serve(prompt(16, seed)).saved for seed in range(50))
    assert pages * layout.row_bytes >= 100 * MIB
    assert guest.cache.stats()["disk_writes"] == 0
    go_on()
    counted = 0
    while guest.cache.stats()["disk_writes"] < pages:
        for _ in range(200_000):  # no call that would let go of the interpreter
            counted += 1
        assert counted < 2_000_000_000, "writes did not come to an end"
    assert guest.close()


def test_what_is_loaded_is_seen_wherever_it_stands():
    hand = ByHand(gpu_rows=8, cpu_rows=8, disk=True)
    first, second = prompt(2, 1), prompt(2, 2)
    for tokens in (first, second):
        hand.release(hand.publish(tokens))
        hand.finish_all()
    for seed in range(10, 16):  # out of both memories
        hand.release(hand.publish(prompt(4, seed)))
        hand.finish_all()
    early, late = hand.lease(first, leave=0), hand.lease(second, leave=0)
    assert [op[1] for op in hand.ops] == ["read"] * 4
    hand.ops = [*hand.ops[2:], *hand.ops[:2]]
    waiting, hand.ops = hand.ops[2:], hand.ops[:2]
    hand.finish_ops()
    hand.finish_copies()
    assert hand.driver.state(late)[0]
    assert hand.hit(late) == 2
    assert not hand.driver.state(early)[0]
    hand.ops = waiting
    hand.finish_all()
    assert hand.hit(early) == 2
