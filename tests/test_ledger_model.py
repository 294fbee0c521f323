"""The driver against a naive model: any order of requests, completions, failures and deadlines leads both to the same decisions.

After every step everything observable is compared: answers, hits, victims (the events name them), what is to be moved, counters,
free rows, deadlines. KVSTRATA_MODEL_EXAMPLES=5000 looks longer, with other seeds every time.
"""

import os
import random
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from ledger_pair import UNKNOWN, LedgerPair, Slots
from naive_ledger import Sizes

EXAMPLES = int(os.environ.get("KVSTRATA_MODEL_EXAMPLES", "0"))
PAGE = 2
SPACES = (b"\1" * 32, b"\2" * 32)

# Prompts that share much: a page is one of two, mostly the first.
tokens = st.builds(
    lambda pages, tail: [token for page in pages for token in (page, 0)] + [0] * tail,
    st.lists(st.sampled_from([0, 0, 0, 1]), max_size=6),
    st.integers(0, PAGE - 1),
)
requests = st.fixed_dictionaries(
    {
        "space": st.sampled_from(SPACES[:1] * 7 + SPACES[1:]),
        "tokens": tokens,
        "reserve": st.sampled_from([0, 0, 0, 1, 3]),
        "leave": st.sampled_from([0, 1, 1, 3]),
        "multiple": st.sampled_from([0, 0, PAGE, 2 * PAGE]),
        "read": st.sampled_from([True] * 7 + [False]),
        "write": st.sampled_from([True] * 7 + [False]),
    }
)
sizes = st.builds(
    lambda gpu, cpu, disk, copy_rows, reads, writes: Sizes(PAGE, gpu, cpu, disk and cpu > 0, copy_rows, reads, writes, 3, 7, 5, 4),
    st.sampled_from([1, 3, 4, 5, 6, 8, 10]),
    st.sampled_from([0, 1, 2, 3, 4, 6, 8]),
    st.sampled_from([True, True, True, False]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
)
STATUSES = ["ok"] * 6 + ["corrupt", "stale", "unreadable", "conflict", "failed", "full"]
late = st.integers(0, 2)  # batches that were submitted since


class LedgerMachine(RuleBasedStateMachine):
    @initialize(sizes=sizes, slots=st.integers(0, 3), found=st.lists(tokens, max_size=3))
    def open(self, sizes: Sizes, slots: int, found: list[list[int]]) -> None:
        self.pair = LedgerPair(sizes)
        if sizes.disk:
            for _ in range(slots):
                self.pair.add_slot()
            for text in found:
                self.pair.add_found(SPACES[0], text)

    def any_lease(self, data: st.DataObject) -> int:
        """Sometimes one that was given back, or never was."""
        id: int = data.draw(st.sampled_from([*self.pair.model.leases] * 6 + self.pair.given_back[-2:] + [UNKNOWN]))
        return id

    @rule(requests=st.lists(requests, min_size=1, max_size=3))
    def lease(self, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            self.pair.lease(request)

    @rule(data=st.data(), count=st.integers(0, 5))
    def generate(self, data: st.DataObject, count: int) -> None:
        self.pair.generate(self.any_lease(data), [0] * count)

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.pair.settle(self.any_lease(data))

    @rule(data=st.data(), count=st.sampled_from([1, 4, 7, 100, 100, 100]), late=late)
    def publish(self, data: st.DataObject, count: int, late: int) -> None:
        self.pair.publish(self.any_lease(data), count, late)

    @rule(data=st.data(), late=late)
    def release(self, data: st.DataObject, late: int) -> None:
        self.pair.release(self.any_lease(data), late)

    @precondition(lambda self: self.pair.model.leases)
    @rule(data=st.data(), count=st.integers(1, 3), patience=st.sampled_from([9, 1, 0]))
    def serve(self, data: st.DataObject, count: int, patience: int) -> None:
        for id in data.draw(st.permutations(list(self.pair.model.leases)))[:count]:
            self.pair.serve(id, patience)

    @rule(data=st.data(), count=st.integers(0, 3))
    def step(self, data: st.DataObject, count: int) -> None:
        done: list[tuple[int, str, Slots]] = []
        moves = self.pair.model.disk_moves
        for _ in range(count):
            twice = [id for id, _, _ in done]
            id = data.draw(st.sampled_from([*moves] * 3 + twice + self.pair.finished[-2:] + [UNKNOWN]))
            grows = id in moves and moves[id].kind == "grow" and id not in twice
            slots = [self.pair.new_slot() for _ in range(data.draw(st.sampled_from([2, 2, 1, 0])))] if grows else []
            done.append((id, data.draw(st.sampled_from(STATUSES)), slots))
        self.pair.advance(done)

    @precondition(lambda self: self.pair.model.copies or self.pair.finished)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def copied(self, data: st.DataObject, ok: bool) -> None:
        self.pair.end_copy(data.draw(st.sampled_from([*self.pair.model.copies] * 4 + self.pair.finished[-2:] + [UNKNOWN])), ok)

    @rule(rounds=st.lists(st.sampled_from([True, True, True, False]), min_size=1, max_size=4))
    def all_moves_end(self, rounds: list[bool]) -> None:
        for ok in rounds:
            self.pair.all_moves_end(ok)

    @precondition(lambda self: self.pair.sizes.disk)
    @rule(text=tokens)
    def another_writes(self, text: list[int]) -> None:
        self.pair.add_shared(SPACES[0], text)

    @precondition(lambda self: self.pair.others_made)
    @rule(data=st.data())
    def anothers_slot_changes(self, data: st.DataObject) -> None:
        self.pair.slot_gone(data.draw(st.integers(1, self.pair.others_made)))

    @precondition(lambda self: self.pair.sizes.disk)
    @rule(data=st.data())
    def segment_goes(self, data: st.DataObject) -> None:
        self.pair.retire_segment(data.draw(st.integers(0, self.pair.slots_made // 4)))

    @rule(seconds=st.sampled_from([0.1, 0.1, 1.0, 2.0, 4.0, 8.0]))
    def time_passes(self, seconds: float) -> None:
        self.pair.model.now += seconds

    @invariant()
    def same(self) -> None:
        self.pair.compare()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.finish()


def test_the_driver_decides_as_the_naive_model() -> None:
    profile = settings(
        max_examples=EXAMPLES or 250,
        stateful_step_count=60,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    run_state_machine_as_test(LedgerMachine, settings=profile)


def wander(seed: int, steps: int) -> LedgerPair:
    """One long life at random, without Hypothesis: many more leases and moves for the same time."""
    rng = random.Random(seed)
    cpu = rng.choice([0, 1, 2, 3, 4, 6, 8, 10])
    disk = cpu > 0 and rng.random() < 0.85
    limits = (rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 2))
    pair = LedgerPair(Sizes(PAGE, rng.choice([3, 5, 7, 9, 12, 16]), cpu, disk, *limits, 3, 7, 5, 4))

    trouble = rng.choice([0, 0.1, 0.4])
    texts = [[rng.choice([0, 0, 0, 1, 2]) for _ in range(6)] for _ in range(rng.randint(2, 12))]
    longest = rng.choice([3, 4, 6])

    def prompt() -> list[int]:
        text = rng.choice(texts)[: rng.randint(0, longest)]
        return [token for page in text for token in (page, 0)] + [0] * rng.randrange(PAGE)

    def request() -> dict[str, Any]:
        flags = {"read": rng.random() < 0.95, "write": rng.random() < 0.95, "leave": rng.choice([0, 1, 1, 3])}
        sizes = {"reserve": rng.choice([0, 0, 0, 1, 3]), "multiple": rng.choice([0, 0, 2, 4])}
        return flags | sizes | {"space": SPACES[rng.random() < 0.05], "tokens": prompt()}

    def lease() -> int:
        return rng.choice([*pair.model.leases] * 6 + pair.given_back[-2:] + [UNKNOWN])

    def serve() -> None:
        """One to three requests from their lookup to their release, beside whatever else is open."""
        known = set(pair.model.leases)
        for _ in range(rng.randint(1, 3)):
            pair.lease(request())
        for id in set(pair.model.leases) - known:
            pair.serve(id, rng.choice([0, 9, 9]))

    def part() -> None:
        """A request of which only what the slab had has arrived when it ends or the disk fails it: gaps between copies."""
        whole = {"tokens": [token for page in rng.choice(texts) for token in (page, 0)], "reserve": 0, "multiple": 0}
        pair.lease(request() | whole | {"leave": 0, "read": True, "space": SPACES[0]})
        pair.advance([])
        pair.all_moves_end(True, kinds=())
        if rng.random() < 0.5 and pair.model.leases:
            pair.release([*pair.model.leases][-1])
        else:
            pair.all_moves_end(True, kinds=("read",), status=rng.choice(STATUSES))

    def report() -> None:
        moves = pair.model.disk_moves
        ids = rng.sample([*moves], min(len(moves), rng.randint(0, 3)))
        if rng.random() < 0.1:
            ids.append(rng.choice([*pair.finished[-2:], UNKNOWN]))
        slots = {
            id: [pair.new_slot() for _ in range(rng.choice([2, 1, 0]))] for id in ids if id in moves and moves[id].kind == "grow"
        }
        status = rng.choice(STATUSES) if rng.random() < trouble else "ok"
        pair.advance([(id, status, slots.get(id, [])) for id in ids])

    def copied() -> None:
        known = [*pair.model.copies]
        late = rng.random() < (0.05 if known else 0.2)
        if not known and not late:
            report()
            return
        pair.end_copy(rng.choice([*pair.finished[-2:], UNKNOWN] if late else known), rng.random() >= trouble)

    def wait() -> None:
        pair.model.now += rng.choice([0.1, 0.1, 0.1, 1, 2, 4, 8])

    def segment_goes() -> None:
        if disk:
            pair.retire_segment(rng.randint(0, pair.slots_made // 4))

    def another_writes() -> None:
        if disk:
            pair.add_shared(SPACES[0], prompt())

    def anothers_slot_changes() -> None:
        if pair.others_made:
            pair.slot_gone(rng.randint(max(1, pair.others_made - 12), pair.others_made))

    actions = [
        (9, serve),
        (rng.choice([0, 2]), another_writes),
        (1, anothers_slot_changes),
        (0.3, segment_goes),
        (4, lambda: pair.lease(request())),
        (5, part),
        (1, lambda: pair.generate(lease(), [0] * rng.randint(0, 5))),
        (1, lambda: pair.settle(lease())),
        (3, lambda: pair.publish(lease(), rng.choice([1, 4, 7, 100, 100]), rng.randint(0, 2))),
        (6, lambda: pair.release(lease(), rng.randint(0, 2))),
        (6, lambda: pair.model.leases and pair.serve(rng.choice([*pair.model.leases]), rng.choice([0, 0, 9]))),
        (6, report),
        (5, copied),
        (2, lambda: pair.all_moves_end(rng.random() >= trouble)),
        (rng.choice([0.3, 1, 5]), wait),
    ]
    for _ in range(rng.randint(0, 3) if disk else 0):
        pair.add_slot()
    for _ in range(rng.randint(0, 3) if disk else 0):
        pair.add_found(SPACES[0], prompt())
    for _ in range(steps):
        rng.choices([action for _, action in actions], [weight for weight, _ in actions])[0]()
        pair.compare()
    pair.finish()
    return pair


def test_long_lives_at_random() -> None:
    for seed in range(EXAMPLES or 150):
        try:
            wander(seed, 200)
        except AssertionError as error:
            raise AssertionError(f"wander({seed}, 200): {error}") from error
