"""What a request finds: in vLLM's own pool, in the CPU tier, on disk, in another process; and that it is always its own."""

from vllm_sim import BLOCK, PAGE, tokens_of


def test_cold_own_cpu_and_disk(make_sim, tmp_path):
    sim = make_sim(disk=tmp_path / "disk")
    prompt = tokens_of(200)
    assert sim.serve(prompt) == (0, 0)
    assert sim.serve(prompt) == (192, 0)
    assert sim.scheduler.reset_prefix_cache()
    assert sim.serve(prompt) == (0, 192)
    assert sim.cache.stats()["cpu"]["used"] == 6
    sim.settle()
    again = make_sim(disk=tmp_path / "disk")
    assert again.serve(prompt) == (0, 192)
    assert again.cache.stats()["disk"]["used"] == 6


def test_after_eviction(make_sim):
    """A pool that holds one prompt; others push it out."""
    sim = make_sim(blocks=16)
    prompts = [tokens_of(200, seed) for seed in range(4)]
    assert [sim.serve(prompt) for prompt in prompts] == [(0, 0)] * 4
    assert [sim.serve(prompt) for prompt in prompts] == [(0, 192)] * 4


def test_what_vllm_holds_may_end_inside_a_page(make_sim):
    sim = make_sim()
    prompt = tokens_of(6 * PAGE + 1)
    sim.serve(prompt)
    sim.scheduler.reset_prefix_cache()
    assert sim.serve(prompt[: 2 * PAGE + BLOCK + 3]) == (0, 2 * PAGE), "only full pages were kept"
    assert sim.serve(prompt) == (2 * PAGE + BLOCK, 3 * PAGE + BLOCK)


def test_a_whole_prompt_leaves_one_token(make_sim):
    sim = make_sim()
    for pages in (1, 2, 3):
        prompt = tokens_of(pages * PAGE, seed=pages)
        sim.serve(prompt)
        sim.scheduler.reset_prefix_cache()
        assert sim.serve(prompt) == (0, pages * PAGE - BLOCK)


def test_generated_tokens_are_kept(make_sim):
    sim = make_sim()
    prompt = tokens_of(PAGE + 5)
    name = sim.add(prompt, new=3 * PAGE)
    sim.run()
    sim.scheduler.reset_prefix_cache()
    turn = prompt + sim.outputs[name] + tokens_of(10, seed=9)
    assert sim.serve(turn) == (0, (len(prompt) + 3 * PAGE - 1) // PAGE * PAGE)


def test_generated_tokens_are_not_kept_where_that_is_switched_off(make_sim):
    sim = make_sim(extra={"save_generated": False})
    prompt = tokens_of(PAGE + 5)
    name = sim.add(prompt, new=3 * PAGE)
    sim.run()
    sim.scheduler.reset_prefix_cache()
    assert sim.serve(prompt + sim.outputs[name]) == (0, PAGE)


def test_without_vllms_own_prefix_cache(make_sim):
    sim = make_sim(prefix_caching=False)
    prompt = tokens_of(200)
    assert [sim.serve(prompt) for _ in range(2)] == [(0, 0), (0, 192)]


def test_no_lease_where_vllm_discards_the_hit(make_sim):
    """Prompt log-probabilities need every token computed."""
    sim = make_sim()
    prompt = tokens_of(200)
    sim.serve(prompt)
    sim.scheduler.reset_prefix_cache()
    before = sim.cache.stats()
    assert sim.serve(prompt, prompt_logprobs=1) == (0, 0)
    after = sim.cache.stats()
    assert after["cpu"]["looked_up"] == before["cpu"]["looked_up"]
    assert sim.serve(prompt[:-1]) == (192, 0)


def test_tenants_share_nothing(make_sim, tmp_path):
    sim = make_sim(disk=tmp_path / "disk")
    prompt = tokens_of(200)
    assert sim.serve(prompt, salt="one") == (0, 0)
    assert sim.serve(prompt, salt="two") == (0, 0)
    assert sim.serve(prompt) == (0, 0)
    sim.settle()
    again = make_sim(disk=tmp_path / "disk")
    assert again.serve(prompt, salt="three") == (0, 0)
    assert again.serve(prompt, salt="two") == (0, 192)
    assert again.serve(prompt) == (0, 192)


def test_more_waiting_prompts_than_the_slab_holds(make_sim, tmp_path):
    """Six requests of 6 pages each, a slab of 8: they take turns, and none loses its hit."""
    prompts = [tokens_of(6 * PAGE + 1, seed) for seed in range(6)]
    first = make_sim(disk=tmp_path / "disk")
    for prompt in prompts:
        first.serve(prompt)
        first.settle()  # half the slab may wait for the disk, and what is saved beyond that is dropped
    sim = make_sim(disk=tmp_path / "disk", cpu_pages=8, blocks=100)
    names = [sim.add(prompt) for prompt in prompts]
    sim.run()
    assert [sim.cached[name] for name in names] == [(0, 6 * PAGE)] * 6
