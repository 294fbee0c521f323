"""D3: requests are cancelled in every state a load can be in; what still moves then must not hit what others own by now."""

import random

import numpy as np
import pytest
from sim_engine import SimEngine
from support import PAGE, ByHand, prompt, settle

from kvstrata.sim_device import SimDevice

STATES = ("queued", "reading", "copying", "unclaimed", "timed out")
GPU_ROWS, CPU_ROWS, READS = 8, 6, 2


class Memory(ByHand):
    """A driver by hand whose rows and slots hold one number each: the page's own, or the canary of who computes there.

    Moves write when they end, however late: into rows that belong to somebody else by then, if the driver gave them away.
    """

    def __init__(self) -> None:
        super().__init__(gpu_rows=GPU_ROWS, cpu_rows=CPU_ROWS, disk=True, reads_at_once=READS, read_deadline=5.0)
        self.pool = np.zeros(GPU_ROWS + 1, np.int64)
        self.slab = np.zeros(CPU_ROWS, np.int64)
        self.disk: dict[tuple[int, int], int] = {}
        for slot in range(64):
            self.driver.add_slot((9, slot))

    def end_copy(self, copy) -> None:
        ticket, up, slab_rows, device_rows, _ = copy
        self.copies.remove(copy)
        if up:
            self.pool[device_rows] = self.slab[slab_rows]
        else:
            self.slab[slab_rows] = self.pool[device_rows]
        self.driver.copied(self.now, ticket, True)
        self.step()

    def end_op(self, op) -> None:
        number, kind, slot, row, _ = op
        self.ops.remove(op)
        if kind == "read":
            self.slab[row] = self.disk[slot]
        elif kind == "write":
            self.disk[slot] = int(self.slab[row])
        self.step([(number, "ok", [])])

    def end_all(self) -> None:
        while self.copies or self.ops:
            for copy in list(self.copies):
                self.end_copy(copy)
            for op in list(self.ops):
                self.end_op(op)

    def rows(self, number: int) -> np.ndarray:
        return np.asarray(self.driver.rows(number))

    def serve(self, tokens: np.ndarray) -> None:
        """A request that finds its pages, right ones, and computes the others."""
        number = self.lease(tokens, leave=0)
        assert number, "the pool stays full"
        self.end_all()
        hit, rows = self.hit(number), self.rows(number)
        assert self.pool[rows[:hit]].tolist() == [value(tokens, page) for page in range(hit)]
        for page in range(hit, len(tokens) // PAGE):
            self.pool[rows[page]] = value(tokens, page)
        self.driver.publish(self.now, number, len(tokens), 0)
        self.release(number)
        self.end_all()


def value(tokens: np.ndarray, page: int) -> int:
    return hash(tokens[: (page + 1) * PAGE].tobytes())


@pytest.mark.parametrize("state", STATES)
def test_cancelled_while(state):
    """2,000 times: cancelled in this state, its rows handed on at once, and only then the moves end, in any order."""
    hand, dice = Memory(), random.Random(state)
    prompts = [prompt(3, seed=number) for number in range(6)]
    reached = 0
    for _ in range(2000):
        tokens = dice.choice(prompts)
        cancelled = bring_to(state, hand, tokens, dice, prompts)
        reached += bool(cancelled)
        for number in cancelled:
            hand.release(number)
        # Whoever comes next gets what is free, and writes there before anything late arrives.
        others = [hand.lease(prompt(pages, seed=100 + pages), read=False) for pages in (4, 2, 1, 1)]
        canaries = {}
        for number in filter(None, others):
            for row in hand.rows(number):
                canaries[row] = hand.pool[row] = -dice.getrandbits(60)
        moving = [*hand.copies, *hand.ops]
        dice.shuffle(moving)
        for move in moving:
            hand.end_copy(move) if len(move[2]) and isinstance(move[1], bool) else hand.end_op(move)
        assert {row: hand.pool[row] for row in canaries} == canaries, "somebody wrote into rows of another request"
        for number in filter(None, others):
            hand.release(number)
        hand.end_all()
        assert hand.driver.idle()
        if dice.random() < 0.2:
            hand.now += 10.0  # what the disk was left alone for is over
            hand.serve(dice.choice(prompts))
    assert reached > 1000
    at_rest(hand, prompts)


def bring_to(state: str, hand: Memory, tokens: np.ndarray, dice: random.Random, prompts: list[np.ndarray]) -> list[int]:
    """Leases of which one is in the state; none where the pool or the tiers do not allow it just now."""
    hand.now += 10.0
    for one in (tokens, dice.choice(prompts), prompt(8, seed=50), prompt(8, seed=51)):  # known, and not on the device any more
        hand.serve(one)
    if state == "queued":
        ahead = hand.lease(dice.choice(prompts), leave=0)
    number = hand.lease(tokens, leave=0)
    if not number:
        return []
    if state == "queued":
        return [one for one in (number, ahead) if one]
    reads = [op for op in hand.ops if op[1] == "read"]
    if state == "reading":
        return [number] if reads else end(hand, number)
    if state == "timed out":
        hand.now += 6.0
        hand.step()
        return [number] if reads else end(hand, number)
    if state == "copying":
        while not any(copy[1] for copy in hand.copies) and hand.ops:
            hand.end_op(hand.ops[0])
        return [number] if any(copy[1] for copy in hand.copies) else end(hand, number)
    hand.end_all()
    return [number]


def end(hand: Memory, number: int) -> list[int]:
    hand.release(number)
    hand.end_all()
    return []


def at_rest(hand: Memory, prompts: list[np.ndarray]) -> None:
    hand.now += 10.0
    hand.end_all()
    stats = hand.stats()
    assert stats["open_leases"] == 0
    assert hand.driver.idle()
    for tier, rows in (("gpu", GPU_ROWS), ("cpu", CPU_ROWS)):
        assert stats[tier]["free"] + stats[tier]["pages"] == rows
    everything = hand.lease(prompt(GPU_ROWS, seed=9), read=False)
    assert everything, "a page stays pinned"
    hand.release(everything)
    for tokens in prompts:
        hand.serve(tokens)


@pytest.mark.slow
def test_cancelled_at_random_on_a_device_of_many_layers(open_cache, tmp_path):
    """The same with threads, a real disk, loads that are waited for layer by layer, and copies that fail or stall."""
    from support import tiny_layout

    device = SimDevice(seed=9, delay=2e-4, calm=0.5)
    cache = open_cache(gpu=24, cpu=20, disk=tmp_path / "disk", layout=tiny_layout(layers=8, width=4), device=device)
    engine = SimEngine(cache, device)
    dice = random.Random(9)
    prompts = [prompt(6, seed=number) for number in range(12)]
    for tokens in prompts:
        engine.serve(tokens)
    for number in range(3000):
        tokens = dice.choice(prompts)
        lease = engine.lease(tokens)
        how = dice.choice(["queued", "layer", "part", "unclaimed", "timed out", "served"])
        failing = how != "layer" and dice.random() < 0.05
        if failing:
            device.fail_copy(dice.randint(1, 3))
        if number % 100 == 0:
            device.stall()
        if how == "layer":
            hit = lease.wait(0.0, layer=0)
            for layer in range(dice.randint(1, 8)):
                lease.wait(0.0, layer=layer)
            assert hit <= lease.matched
        if number % 100 == 0:
            device.resume()  # before anything waits for kernels: one of them may wait for the copies of an earlier lease
        if how == "part":
            device.synchronize()
        if how in ("unclaimed", "timed out"):
            lease.wait(None if how == "unclaimed" else 0.0)
        lease.release(device.mark_batch())
        if how == "served":
            engine.serve(tokens, timeout=dice.choice([0.0, None]))
    engine.proven()
    settle(cache)
    cache.check_integrity()
    stats = cache.stats()
    assert stats["open_leases"] == 0
    assert stats["copy_failures"] > 20
    for tier, rows in (("gpu", 24), ("cpu", 20)):
        assert stats[tier]["free"] + stats[tier]["pages"] == rows
    everything = cache.lease(prompt(24, seed=99))
    assert everything, "a page stays pinned"
    everything.release()
    for tokens in prompts:
        engine.serve(tokens)
    engine.proven()
