"""C5: lookups that are loaded, cancelled or asked again pin nothing in the end, and the hit rate does not fade over time."""

import random

import pytest
from sim_engine import SimEngine
from support import PAGE, prompt, settle

from kvstrata.sim_device import SimDevice

LOOKUPS = 10_000
GPU_ROWS, CPU_ROWS = 32, 48


@pytest.mark.slow
def test_hit_rate_and_pins_after_ten_thousand_lookups(open_cache, tmp_path):
    device = SimDevice(seed=5, delay=5e-5, calm=0.95)
    cache = open_cache(gpu=GPU_ROWS, cpu=CPU_ROWS, disk=tmp_path / "disk", disk_bytes=2 << 20, device=device)
    engine = SimEngine(cache, device)
    prompts = [prompt(1 + number % 6, seed=number) for number in range(60)]
    weights = [1 / (1 + number) for number in range(60)]

    def run(lookups: int, seed: int) -> float:
        """The share of full pages that were served from the cache."""
        dice = random.Random(seed)
        found = pages = asked = 0
        while asked < lookups:
            tokens = dice.choices(prompts, weights)[0]
            what = dice.choice(["load", "cancel", "repeat"])
            if dice.random() < 0.02:
                device.fail_copy(dice.randint(1, 4))
            for _ in range(dice.randint(1, 5) if what == "repeat" else 1):
                asked += 1
                lease = engine.lease(tokens)
                if dice.random() < 0.01:
                    with pytest.raises(ZeroDivisionError), lease:
                        fail()
                    continue
                if what == "load":
                    lease.wait()
                lease.release()
            if what != "cancel":
                found += engine.serve(tokens)
                pages += (len(tokens) - 1) // PAGE
                asked += 1
        return found / pages

    run(LOOKUPS // 2, seed=1)  # until the tiers are full
    first, second = run(LOOKUPS // 2, seed=1), run(LOOKUPS // 2, seed=1)
    engine.proven()
    settle(cache)
    print(f"hit rate {first:.4f}, then {second:.4f}", cache.stats())
    assert abs(first - second) < 0.01
    stats = cache.stats()
    assert stats["open_leases"] == 0
    assert stats["copy_failures"] > 20
    for tier, rows in (("gpu", GPU_ROWS), ("cpu", CPU_ROWS)):
        assert stats[tier]["free"] + stats[tier]["pages"] == rows
    everything = cache.lease(prompt(GPU_ROWS, seed=999))
    assert everything, "a page stays pinned"
    everything.release()
    cache.check_integrity()


def fail() -> None:
    raise ZeroDivisionError
