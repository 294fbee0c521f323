"""A block is saved before vLLM may reuse it, and loaded before anybody reads it, whatever happens to its request."""

import random

import pytest
from vllm_sim import PAGE, tokens_of


def test_a24_preempted_while_saving(make_sim):
    """A24. A pool too small for what runs: requests are preempted, their blocks handed out at once, and every block that anybody
    reads
    is his own. The preempted ones come back, by what was saved of them."""
    sim = make_sim(blocks=18, seqs=4, cpu_pages=64)
    names = [sim.add(tokens_of(2 * PAGE + 3, seed), new=4 * PAGE) for seed in range(3)]
    sim.run()
    assert sim.preempted > 0
    assert all(sim.finished[name] == "length" for name in names)
    assert all(len(sim.outputs[name]) == 4 * PAGE for name in names)
    assert sim.cache.stats()["cpu"]["used"] > 0, "who came back did not compute everything again"
    sim.scheduler.reset_prefix_cache()
    for seed, name in enumerate(names):
        assert sim.serve(tokens_of(2 * PAGE + 3, seed) + sim.outputs[name]) == (0, 6 * PAGE)


@pytest.mark.parametrize("step", range(6))
def test_aborted_at_any_step(make_sim, step):
    """While it waits, loads, computes and saves; then its blocks are another's."""
    sim = make_sim(blocks=24)
    known = tokens_of(5 * PAGE + 1)
    sim.serve(known)
    sim.scheduler.reset_prefix_cache()
    name = sim.add(known + tokens_of(5 * PAGE, seed=1), new=2 * PAGE)
    for _ in range(step):
        sim.step()
    sim.abort(name)
    assert sim.serve(tokens_of(9 * PAGE, seed=2)) == (0, 0)
    assert sum(sim.serve(known)) == 5 * PAGE
    sim.step()
    assert not sim.scheduler.requests


def test_aborted_between_the_plan_and_its_report(make_sim):
    """The client leaves while the worker loads: vLLM keeps the blocks until the load is reported, and then forgets the request."""
    sim = make_sim()
    known = tokens_of(5 * PAGE + 1)
    sim.serve(known)
    sim.scheduler.reset_prefix_cache()
    name = sim.add(known)
    output = sim.scheduler.schedule()
    (load,) = output.kv_connector_metadata.loads
    sim.abort(name)
    assert name in sim.scheduler.requests, "its blocks are being written to"
    results = [sim._execute(rank, output) for rank in sim.ranks]
    sim.scheduler.update_from_output(output, results[0])
    assert name not in sim.scheduler.requests
    assert load.request == name
    assert sim.serve(known) == (0, 5 * PAGE)


def test_the_end_does_not_wait_for_workers_that_are_gone(make_sim):
    """A step was planned and will never be reported: what had been saved is kept, and closing does not wait for the rest."""
    sim = make_sim()
    sim.serve(tokens_of(3 * PAGE))
    sim.add(tokens_of(3 * PAGE, seed=1))
    output = sim.scheduler.schedule()
    assert output.kv_connector_metadata.saves
    scheduler = sim.connector.scheduler
    assert not sim.cache.flush(0)
    scheduler.close()
    assert sim.cache.close(), "everything else was saved"
    assert sim.cache.stats()["copy_failures"] == 1


def test_reset_while_running(make_sim):
    """vLLM's own reset preempts what runs; what we keep stays valid."""
    sim = make_sim()
    names = [sim.add(tokens_of(3 * PAGE, seed), new=2 * PAGE) for seed in range(3)]
    for _ in range(5):
        sim.step()
    assert sim.scheduler.reset_prefix_cache(reset_running_requests=True)
    sim.run()
    assert [sim.finished[name] for name in names] == ["length"] * 3
    assert sim.cache.stats()["cpu"]["used"] > 0


def test_weights_changed_in_place(make_sim, tmp_path):
    """A reset that includes the connector makes everything outdated, in every tier, for requests that wait and for those that
    run."""
    sim = make_sim(disk=tmp_path / "disk")
    known = tokens_of(5 * PAGE + 1)
    sim.serve(known)
    sim.settle()
    running = sim.add(tokens_of(3 * PAGE, seed=1), new=3 * PAGE)
    for _ in range(3):
        sim.step()
    waiting = sim.add(known)
    sim.weights += 1
    assert sim.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    sim.run()
    assert sim.cached[waiting] == (0, 0)
    assert sim.finished[running] == "length"
    assert sim.serve(known) == (5 * PAGE, 0)
    sim.scheduler.reset_prefix_cache()
    assert sim.serve(known) == (0, 5 * PAGE)
    sim.settle()
    again = make_sim(disk=tmp_path / "disk")  # its weights come from their files: others than either, for all that is known
    assert again.serve(known) == (0, 0)


def test_a_reset_that_does_not_preempt(make_sim):
    """What runs on goes on with blocks of the old weights, and none of them is found by who comes later."""
    sim = make_sim()
    prompt = tokens_of(3 * PAGE + 1)
    running = sim.add(prompt, new=3 * PAGE)
    sim.step()
    sim.connector.reset_cache()
    sim.run()
    assert sim.finished[running] == "length"
    sim.weights += 1
    sim.scheduler.reset_prefix_cache()
    assert sim.serve(prompt) == (0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_a07_many_requests(make_sim, tmp_path, seed):
    """A7. Shared and private prefixes, tenants, aborts, resets, a pool that preempts, a slab far smaller than what is asked for,
    and
    weights that change: no request ever reads what is not its own, and all end."""
    dice = random.Random(seed)
    sim = make_sim(
        blocks=dice.choice((20, 30, 44)),
        cpu_pages=dice.choice((8, 12, 40)),
        disk=tmp_path / "disk" if dice.random() < 0.8 else None,
        prefix_caching=dice.random() < 0.8,
        page=dice.choice((16, 32, 64)),
        seqs=4,
        budget=dice.choice((64, 256)),
        settings={"kvc2.load_deadline_s": 1},  # requests that hold the slab against each other give it up soon
    )
    trunk = [tokens_of(6 * PAGE, seed=1000 + n) for n in range(5)]
    most = sim.config.model_config.max_model_len - 1
    names: list[str] = []
    for turn in range(150):
        if dice.random() < 0.5:
            tokens = dice.choice(trunk)[: dice.randint(1, 6 * PAGE)] + tokens_of(dice.randint(0, 60), seed=turn)
            tokens = tokens[: most - 40]
            salt = dice.choice((None, None, "a", "b"))
            names.append(sim.add(tokens, new=dice.choice((1, 1, 5, 40)), salt=salt, prompt_logprobs=dice.choice((None, None, 0))))
        for _ in range(dice.randint(0, 4)):
            sim.step()
        if dice.random() < 0.1 and names:
            name = dice.choice(names)
            if name not in sim.finished:
                sim.abort(name)
        if dice.random() < 0.03:
            sim.scheduler.reset_prefix_cache(reset_running_requests=False)
    sim.run()
    assert set(names) == set(sim.finished)
    stats = sim.cache.stats()
    assert stats["cpu"]["used"] + stats["disk"]["used"] > 20
    assert stats["corrupt"] == stats["copy_failures"] == 0
