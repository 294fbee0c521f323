"""What is seen of it: vLLM's own counters, ours beside them, and events for routers."""

import numpy as np
import prometheus_client
import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm_sim import BLOCK, PAGE, tokens_of

from kvstrata.connect.vllm.stats import Stats, StatsTaker

PROMPT = tokens_of(6 * PAGE + 1)


def test_vllms_own_counters(make_sim, tmp_path):
    """Queries and hits beyond its own pool, and where they came from."""
    sim = make_sim(disk=tmp_path / "disk")
    sim.serve(PROMPT)
    sim.settle()
    sim.connector.shutdown()
    again = make_sim(disk=tmp_path / "disk")
    again.serve(PROMPT)
    again.scheduler.reset_prefix_cache()
    again.serve(PROMPT)
    assert again.queries == 2 * len(PROMPT)
    assert again.hits == {"disk": 6 * PAGE, "host": 6 * PAGE}


def test_our_counters_on_vllms_page(make_sim, tmp_path):
    sim = make_sim(disk=tmp_path / "disk")
    taker = StatsTaker(sim.cache.stats)
    page = KVConnectorProm(sim.config, ["engine"], {0: ["0"]})
    seen = []
    try:
        for now, prompt in enumerate([PROMPT, tokens_of(40, seed=1), PROMPT]):
            sim.serve(prompt)
            sim.settle()
            sim.scheduler.reset_prefix_cache()
            seen.append(taker.take(float(10 * now)))
            page.observe(seen[-1].data)
        assert taker.take(20.5) is None, "one look a second"
        assert taker.take(30.0) is None, "nothing happened"
        text = prometheus_client.generate_latest().decode()
        for line in (
            'kvstrata:used_total{engine="0",tier="cpu"} 6.0',
            'kvstrata:used_total{engine="0",tier="disk"} 0.0',
            'kvstrata:stored_total{engine="0",tier="disk"} 7.0',
            'kvstrata:missed_pages_total{engine="0"} 7.0',
            'kvstrata:pages{engine="0",tier="disk"} 7.0',
            'kvstrata:healthy{engine="0",tier="disk"} 1.0',
        ):
            assert line in text.splitlines(), line
    finally:
        for name in list(prometheus_client.REGISTRY._names_to_collectors):
            if name.startswith("kvstrata:") and name in prometheus_client.REGISTRY._names_to_collectors:
                prometheus_client.REGISTRY.unregister(prometheus_client.REGISTRY._names_to_collectors[name])


def test_our_line_in_vllms_log(make_sim):
    sim = make_sim()
    logging = KVConnectorLogging(sim.config.kv_transfer_config)
    taker = StatsTaker(sim.cache.stats)
    for now in range(2):
        sim.serve(PROMPT)
        sim.scheduler.reset_prefix_cache()
        logging.observe(taker.take(10.0 * now).data)
    lines = []
    logging.log(lambda *told: lines.append(told))
    assert "cpu.used=6" in lines[0][1]
    assert "cpu.pages=6" in lines[0][1]


def test_stats_survive_the_way_to_the_frontend():
    """They are sent as plain data, and added up on the other side."""
    one, two = (
        Stats({"counters": {"a": 1, "b": 2}, "now": {"cpu.pages": 3}}),
        Stats({"counters": {"a": 4}, "now": {"cpu.pages": 5}}),
    )
    assert not one.is_empty()
    assert one.aggregate(two).data == {"counters": {"a": 5, "b": 2}, "now": {"cpu.pages": 5}}
    one.reset()
    assert one.is_empty()


@pytest.fixture
def telling(make_sim, tmp_path):
    """A simulated engine whose events are kept, and a function that returns those that came since it was last called."""
    sim = make_sim(
        disk=tmp_path / "disk", cpu_pages=8, kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    )
    kept = []
    real = sim.connector.take_events
    sim.connector.take_events = lambda: kept.extend(events := real()) or events

    def taken():
        sim.settle()
        kept.extend(real())
        events, kept[:] = list(kept), []
        return events

    return sim, taken


def test_events_tell_where_blocks_are(telling):
    sim, taken = telling
    name = sim.add(PROMPT[: 4 * PAGE + 1])
    sim.run()
    hashes = [int.from_bytes(one, "big") & ((1 << 64) - 1) for one in sim._requests[name].block_hashes]
    events = taken()
    for medium in ("CPU", "STORAGE"):
        stored = [event for event in events if isinstance(event, BlockStored) and event.medium == medium]
        stored.sort(key=lambda event: hashes.index(event.block_hashes[0]))  # written to disk in any order
        assert [one for event in stored for one in event.block_hashes] == hashes[:8]
        assert [event.parent_block_hash for event in stored] == [None, hashes[1], hashes[3], hashes[5]]
        assert [token for event in stored for token in event.token_ids] == PROMPT[: 4 * PAGE]
        assert {event.block_size for event in stored} == {BLOCK}


def test_events_replayed_are_what_there_is(telling):
    """F11. Whoever follows the events knows at any time which blocks are in which tier."""
    sim, taken = telling
    held = {"CPU": set(), "STORAGE": set()}
    for seed in np.random.default_rng(0).integers(0, 6, 40):
        sim.serve(tokens_of(3 * PAGE + 1, seed=100 + int(seed)))
        sim.scheduler.reset_prefix_cache()
        for event in taken():
            for one in event.block_hashes:
                if isinstance(event, BlockStored):
                    held[event.medium].add(one)
                elif isinstance(event, BlockRemoved):
                    held[event.medium].remove(one)
        stats = sim.cache.stats()
        assert len(held["CPU"]) == 2 * stats["cpu"]["pages"]
        assert len(held["STORAGE"]) == 2 * stats["disk"]["pages"]
