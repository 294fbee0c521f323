"""Pages of equal tokens are interchangeable only where everything else that decides them is equal, too."""

import json

import torch
from support import until
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm_sim import BLOCK, PAGE, tokens_of, write_model

PROMPT = tokens_of(5 * PAGE + 1)
HIT = (0, 5 * PAGE)


def fresh(sim):
    """vLLM's own cache knows nothing more: what is found is ours."""
    assert sim.scheduler.reset_prefix_cache()
    return sim


def write_adapter(folder, content: bytes, scale: float = 1.0):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": scale}))
    (folder / "adapter_model.bin").write_bytes(content)
    return folder


def wait_for_adapter(sim, name):
    tracked = sim.connector.scheduler._requests[name]
    until(lambda: tracked.adapter.done, "the adapter was digested")
    return tracked.adapter


def serve(sim, prompt, adapter):
    name = sim.add(prompt, lora_request=adapter)
    wait_for_adapter(sim, name)
    sim.run()
    return sim.cached[name]


def test_a15_adapters_by_content(make_sim, tmp_path):
    """A15. Base, two adapters, other weights under the same name, another scale: nobody reads another's pages, and A comes back as
    A."""
    sim = make_sim(enable_lora=True, max_loras=4)
    one = LoRARequest("a", 1, str(write_adapter(tmp_path / "one", b"1" * 100)))
    two = LoRARequest("b", 2, str(write_adapter(tmp_path / "two", b"2" * 100)))
    scaled = LoRARequest("c", 3, str(write_adapter(tmp_path / "three", b"1" * 100, scale=2.0)))
    for adapter in (None, one, two, scaled):
        assert serve(fresh(sim), PROMPT, adapter) == (0, 0)
    for adapter in (None, one, two, scaled):
        assert serve(fresh(sim), PROMPT, adapter) == HIT
    copy = LoRARequest("d", 4, str(write_adapter(tmp_path / "copy", b"1" * 100)))
    assert serve(fresh(sim), PROMPT, copy) == HIT, "the same content under another name and path"
    write_adapter(tmp_path / "one", b"3" * 100)
    reloaded = LoRARequest("a", 1, one.lora_path, load_inplace=True)
    assert serve(fresh(sim), PROMPT, reloaded) == (0, 0)
    assert serve(fresh(sim), PROMPT, LoRARequest("a", 1, one.lora_path)) == HIT


def test_an_adapter_that_changed_without_a_reload(make_sim, tmp_path, caplog):
    """What vLLM computes with is not what the files hold now: neither read nor saved."""
    sim = make_sim(enable_lora=True)
    adapter = LoRARequest("a", 1, str(write_adapter(tmp_path / "one", b"1" * 100)))
    assert serve(sim, PROMPT, adapter) == (0, 0)
    old = (tmp_path / "one" / "adapter_model.bin").read_bytes()
    write_adapter(tmp_path / "one", b"2" * 100)
    saved = sim.cache.stats()["cpu"]["stored"]
    fresh(sim)
    name = sim.add(PROMPT, lora_request=adapter)
    assert wait_for_adapter(sim, name).value is None
    (tmp_path / "one" / "adapter_model.bin").write_bytes(old)  # the worker's copy is still this one
    sim.run()
    assert sim.cached[name] == (0, 0)
    assert sim.cache.stats()["cpu"]["stored"] == saved
    assert "changed after it was loaded" in caplog.text


def test_an_adapter_that_cannot_be_read(make_sim, tmp_path, caplog):
    sim = make_sim(enable_lora=True)
    folder = write_adapter(tmp_path / "one", b"1" * 100)
    (folder / "adapter_config.json").write_text("not json")
    adapter = LoRARequest("a", 1, str(folder))
    assert serve(sim, PROMPT, adapter) == (0, 0)
    assert serve(fresh(sim), PROMPT, adapter) == (0, 0)
    assert caplog.text.count("are not cached") == 1
    assert serve(fresh(sim), PROMPT, None) == (0, 0)
    assert serve(fresh(sim), PROMPT, None) == HIT, "the thread that digests lives on"


def image(identifier, offset, length=20):
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=offset, length=length))


def test_a17_media(make_sim):
    """A17. The same placeholder tokens for another image: shared up to the page in which it begins. At another place: another
    page."""
    sim = make_sim()
    at = 2 * PAGE + 5
    assert sim.serve(PROMPT, mm_features=[image("one", at)]) == (0, 0)
    assert fresh(sim).serve(PROMPT, mm_features=[image("two", at)]) == (0, 2 * PAGE)
    assert fresh(sim).serve(PROMPT, mm_features=[image("one", at + 3)]) == (0, 2 * PAGE)
    assert fresh(sim).serve(PROMPT) == (0, 2 * PAGE)
    assert fresh(sim).serve(PROMPT, mm_features=[image("one", at)]) == HIT
    assert fresh(sim).serve(PROMPT, mm_features=[image("two", at)]) == HIT
    assert fresh(sim).serve(PROMPT, mm_features=[image("one", at, 40), image("two", at + 20, 40)]) == (0, 0), (
        "they lie on each other"
    )


def test_embeddings_instead_of_tokens(make_sim):
    sim = make_sim(enable_prompt_embeds=True)
    torch.manual_seed(0)
    one = torch.randn(5 * PAGE + 1, 8)
    two = one.clone()
    two[3 * PAGE + 2, 1] += 1
    assert sim.serve([], prompt_embeds=one) == (0, 0)
    assert fresh(sim).serve([], prompt_embeds=two) == (0, 3 * PAGE)
    assert fresh(sim).serve([], prompt_embeds=one) == HIT
    assert fresh(sim).serve([0] * len(one)) == (0, 0), "nor are they the tokens that stand in for them"


def test_a_session_whose_tokens_may_be_rewritten(make_sim):
    """Input that arrives while it runs replaces what was generated: such requests are left alone."""
    sim = make_sim()
    sim.serve(PROMPT)
    name = sim.add(PROMPT, resumable=True)
    assert name not in sim.connector.scheduler._requests
    fresh(sim)
    sim.step()
    assert sim.cached[name] == (0, 0)


def test_a18_a20_other_weights_dtype_or_layout(make_sim, tmp_path):
    """A18, A20. Everything that changes what a block holds changes the namespace; back again, pages are found."""
    model = write_model(tmp_path / "model")
    disk = tmp_path / "disk"

    def served(**options):
        sim = make_sim(disk=disk, **{"model": model, **options})
        found = sim.serve(PROMPT)
        sim.settle()
        sim.connector.shutdown()
        return found

    assert served() == (0, 0)
    assert served() == HIT
    assert served(model=write_model(tmp_path / "other", seed=1)) == (0, 0)
    assert served(model=write_model(tmp_path / "rope", rope_parameters={"rope_type": "default", "rope_theta": 5.0})) == (0, 0)
    assert served(dtype="bfloat16") == (0, 0), "activations of another width make other states"
    assert served(page=2 * PAGE)[1] == 0
    assert served(ranks=2) == (0, 0)
    moved = tmp_path / "moved"
    model.rename(moved)
    assert served(model=moved) == HIT
    assert len(list((disk / "namespaces").glob("*.json"))) >= 6


def test_the_workers_layout_counts(make_sim, monkeypatch, tmp_path):
    """The instruction set that blocks are tiled for is known by the worker alone."""
    from kvstrata.connect.vllm import worker

    disk = tmp_path / "disk"
    sim = make_sim(disk=disk)
    sim.serve(PROMPT)
    sim.settle()
    sim.connector.shutdown()
    real = worker.layout_of
    monkeypatch.setattr(worker, "layout_of", lambda *given: real(*given).replace("/-/", "/amx/"))
    assert make_sim(disk=disk).serve(PROMPT) == (0, 0)
    assert BLOCK < PAGE
