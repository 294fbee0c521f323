"""Waiting for a hit layer by layer: what is computed meanwhile counts only when all of the hit came."""

import pytest
from sim_engine import SimEngine
from support import prompt, settle, tiny_layout

from kvstrata.lease import PagesLost
from kvstrata.sim_device import SimDevice

LAYERS = 8


@pytest.fixture
def device():
    return SimDevice(seed=3, delay=2e-3, calm=0.2)


@pytest.fixture
def engine(open_cache, device):
    """Four pages of a prompt are in the CPU tier, and the pool's rows are somebody else's by now."""
    cache = open_cache(gpu=8, cpu=16, layout=tiny_layout(layers=LAYERS, width=4), device=device)
    engine = SimEngine(cache, device)
    for seed in (1, 2, 2):
        engine.serve(prompt(4 if seed == 1 else 8, seed))
        settle(cache)
    return engine


def begun(engine, tokens):
    """A lease of which only the first layer was waited for, what it promised in pages, and the batch of the rest."""
    lease = engine.lease(tokens)
    hit = lease.wait(layer=0) // engine.cache.page_size
    return lease, hit, engine.write(lease.rows, tokens, hit, len(tokens) // engine.cache.page_size)


def test_published_before_all_of_the_hit_came(engine):
    tokens = prompt(6, 1)
    tokens[: len(prompt(4, 1))] = prompt(4, 1)
    lease, hit, fence = begun(engine, tokens)
    assert hit == 4
    assert lease.publish(len(tokens), ready=fence) == len(tokens)
    lease.release(fence)
    assert engine.serve(tokens) == 5  # one token is always computed
    engine.proven()


def test_a_hit_that_failed_after_it_was_promised(engine, device):
    tokens = prompt(6, 1)
    tokens[: len(prompt(4, 1))] = prompt(4, 1)
    device.fail_copy(1)
    lease, hit, fence = begun(engine, tokens)
    assert hit == 4
    with pytest.raises(PagesLost, match="a hit of 64 tokens"):
        lease.publish(len(tokens), ready=fence)
    hit = lease.wait() // engine.cache.page_size
    assert hit < 4
    fence = engine.write(lease.rows, tokens, hit, 6)
    assert lease.publish(len(tokens), ready=fence) == len(tokens)
    lease.release(engine.read(lease.rows, tokens, 6))
    engine.serve(tokens)
    engine.proven()


def test_given_back_without_another_look(engine, device):
    """Whoever does not care that the hit failed publishes nothing."""
    tokens = prompt(6, 1)
    tokens[: len(prompt(4, 1))] = prompt(4, 1)
    device.fail_copy(1)
    lease, _, fence = begun(engine, tokens)
    with pytest.raises(PagesLost):
        lease.publish(len(tokens), ready=fence)
    lease.release(fence)
    engine.serve(tokens)
    engine.proven()
