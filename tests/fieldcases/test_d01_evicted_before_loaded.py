"""D1: whatever is evicted between a lookup and its load, a lease gets exactly the pages it was promised, or says how many fewer."""

import random
import threading
from collections import Counter

import numpy as np
import pytest
from support import PAGE, fill, fingerprint, prompt, serve, settle, tiny_layout, wrong

from kvstrata.cache import PrefixCache

TRIES = 100_000
CLIENTS = 2


class Evictor:
    """Requests without end that nothing is known of: each pushes out what it can."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.served = 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        draw = np.random.default_rng(1)
        while not self.stop.is_set():
            tokens = draw.integers(0, 1 << 30, 6 * PAGE, np.int32)
            lease = self.cache.lease(tokens)
            if lease:
                lease.wait()
                if not lease.lost:
                    fill(self.cache, lease.rows, tokens, 0, 6)
                    lease.publish(len(tokens))
                lease.release(0)
                self.served += 1


@pytest.mark.slow
def test_exactly_the_leased_pages_or_an_explicit_shorter_length(open_cache, tmp_path):
    cache = open_cache(
        gpu=40, cpu=24, disk=tmp_path / "disk", disk_bytes=4 << 20, layout=tiny_layout(width=2), identity=None, events=0
    )
    documents = [prompt(1 + number % 6, seed=number) for number in range(40)]
    space, layout = cache.namespace(), cache.layout
    expected = [
        np.stack([fingerprint(layout, space, tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)]) for tokens in documents
    ]
    pool = cache.pool.data.numpy()[:, : layout.row_bytes]
    counts: Counter[str] = Counter()
    faults: list[str] = []
    lock = threading.Lock()

    def client(seed: int) -> None:
        dice = random.Random(seed)
        mine: Counter[str] = Counter()
        for _ in range(TRIES // CLIENTS):
            number = dice.randrange(len(documents))
            tokens, pages = documents[number], len(expected[number])
            lease = cache.lease(tokens, leave=0)
            if not lease:
                mine["full"] += 1
                continue
            hit = lease.wait(dice.choice([0.0, 0.0, 0.0005, None]))
            if hit > lease.matched or hit % PAGE or sum(lease.sources.values()) != hit:
                faults.append(f"promised {lease.matched}, delivered {hit} from {lease.sources}")
            elif lease.lost:
                mine["lost"] += 1
            elif not np.array_equal(pool[lease.rows[: hit // PAGE]], expected[number][: hit // PAGE]):
                faults.append(f"promised {lease.matched}, delivered {hit}: not all of it are its bytes")
            mine["exact" if hit == lease.matched else "shorter"] += 1
            mine["promised"] += lease.matched // PAGE
            mine["delivered"] += hit // PAGE
            if hit // PAGE < pages and not lease.lost and dice.random() < 0.5:
                pool[lease.rows[hit // PAGE : pages]] = expected[number][hit // PAGE :]
                lease.publish(len(tokens))
            lease.release(0)
            if faults:
                break
        with lock:
            counts.update(mine)

    evictor = Evictor(cache)
    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(CLIENTS)]
    for thread in [evictor.thread, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    evictor.stop.set()
    evictor.thread.join()
    print(dict(counts), evictor.served, cache.stats())
    assert not faults, faults[0]
    assert counts["exact"] + counts["shorter"] + counts["full"] == TRIES
    assert counts["exact"] > TRIES // 4
    assert counts["shorter"] > 100, "nothing was ever evicted before it was loaded"
    settle(cache)
    assert evictor.served > 100


def test_ranks_agree_on_what_all_of_them_have(tmp_path, open_cache):
    """Four stores of their own, of which one lost pages: all go on from the shortest hit, and only from there."""
    tokens = prompt(5, seed=7)
    ranks = [open_cache(gpu=8, cpu=8 if rank != 2 else 0) for rank in range(4)]
    for cache in ranks:
        serve(cache, tokens)
        settle(cache)
    with ranks[2].lease(prompt(5, seed=8), reserve=0) as lease:  # rank 2 has no second tier: this costs it its last pages
        lease.wait()
    leases = [cache.lease(tokens) for cache in ranks]
    hits = [lease.wait() for lease in leases]
    assert hits[2] < hits[0] == hits[1] == hits[3] == 4 * PAGE
    agreed = min(hits)
    for lease in leases:
        lease.release()
    for cache in ranks:
        with cache.lease(tokens, leave=len(tokens) - agreed) as lease:
            assert lease.wait() == agreed
            assert not wrong(cache, lease.rows, tokens, agreed // PAGE)
            fill(cache, lease.rows, tokens, agreed // PAGE, 5)  # into rows of its own, also where other pages were known
            lease.publish(len(tokens))
            assert not wrong(cache, lease.rows, tokens, 5)
