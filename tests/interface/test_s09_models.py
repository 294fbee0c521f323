"""S9: models of both families run through the cache classes and the engine, their states kept in the pages, MLA's as latents, and
restored from every tier with the bits of a recomputation by transformers alone.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import BYTES, words
from every_tier import logits
from processes import outcome, python
from view_model import CHUNK, KINDS, model_of, open_for, push_out, recomputed, through

from kvstrata.engine import Engine
from kvstrata.engine.runner import PagedRunner, PastRunner

PROMPT = 3 * CHUNK + 9
REUSED = 3 * CHUNK
HEADS = (1, 2, 3, 8)
FROM_TIERS = (("none", 0), ("gpu", 0), ("cpu", 1), ("disk", 4))  # and how often others need the whole pool before
CASES = [
    *[(kind, "deepseek", 0) for kind in ("KVC2StaticCache", "KDeepSeekV3Cache")],
    *[(kind, family, heads) for kind, family in (("KVC2Qwen3Cache", "qwen3"), ("KGQACache", "llama")) for heads in HEADS],
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Equality bit for bit is promised for one thread."""
    torch.set_num_threads(1)


def from_tier(tier: str) -> dict[str, int]:
    return {name: REUSED if name == tier else 0 for name in ("gpu", "cpu", "disk")}


def in_a_new_process(folder: Path, out: Path, family: str, heads: int, kind: str, page_size: int) -> Any:
    outcome(python("restored.py", folder, family, heads, kind, page_size, PROMPT, out))
    return torch.load(out)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("kind", "family", "heads"), CASES)
def test_a_class_gives_the_bits_of_a_recomputation(tmp_path: Path, kind: str, family: str, heads: int, page_size: int) -> None:
    model, tokens = model_of(family, heads), words(PROMPT)
    wanted = recomputed(model, tokens)
    found = {}
    with open_for(model, page_size, tmp_path / "disk") as cache:
        view = KINDS[kind](model.config, cache=cache)
        found["none"] = through(view, model, tokens)
        found["gpu"] = through(view, model, tokens)
        assert cache.flush(60)
        push_out(cache, 1)
        found["cpu"] = through(view, model, tokens)
        push_out(cache, 4)
        found["disk"] = through(view, model, tokens)
        cache.check_integrity()
    if page_size == 64:  # a second form of page changes nothing about processes
        found["restart"] = in_a_new_process(tmp_path / "disk", tmp_path / "told", family, heads, kind, page_size)
    for case, (scores, sources) in found.items():
        assert sources == from_tier("disk" if case == "restart" else case), case
        assert torch.equal(scores, wanted), case


@pytest.mark.parametrize(
    ("family", "heads"), [("deepseek", 0), *[(family, heads) for family in ("qwen3", "llama") for heads in HEADS]]
)
def test_the_engine_gives_the_bits_of_a_recomputation(tmp_path: Path, family: str, heads: int) -> None:
    model, tokens = model_of(family, heads), words(PROMPT)
    whole = recomputed(model, tokens)
    found = {}
    with open_for(model, 64, tmp_path / "disk") as cache:
        wanted, _ = logits(Engine(model, BYTES, cache, reuse=False), tokens, new=3)
        engine = Engine(model, BYTES, cache)
        assert isinstance(engine.runner, PastRunner if family == "deepseek" else PagedRunner)
        found["none"] = logits(engine, tokens, new=3)
        found["gpu"] = logits(engine, tokens, new=3)
        assert cache.flush(60)
        push_out(cache, 1)
        found["cpu"] = logits(engine, tokens, new=3)
        push_out(cache, 4)
        found["disk"] = logits(engine, tokens, new=3)
        cache.check_integrity()
    found["restart"] = in_a_new_process(tmp_path / "disk", tmp_path / "told", family, heads, "engine", 64)
    for case, (scores, sources) in found.items():
        assert sources == from_tier("disk" if case == "restart" else case), case
        assert torch.equal(scores, wanted), case
    assert torch.allclose(wanted, whole[:3], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kinds", "family", "heads"),
    [
        (("KVC2StaticCache", "KDeepSeekV3Cache"), "deepseek", 0),
        (("KVC2Qwen3Cache",), "qwen3", 2),
        (("KGQACache",), "llama", 3),
    ],
)
def test_half_precision(tmp_path: Path, kinds: tuple[str, ...], family: str, heads: int, dtype: torch.dtype) -> None:
    """The dtypes that are served in: the classes, then the engine, which sets the model's attention."""
    model, tokens = model_of(family, heads).to(dtype), words(PROMPT)
    wanted = recomputed(model, tokens)
    assert wanted.dtype == dtype
    for kind in kinds:
        with open_for(model, 64, tmp_path / kind) as cache:
            view = KINDS[kind](model.config, cache=cache)
            assert view.dtype == dtype
            for tier, rounds in FROM_TIERS:
                push_out(cache, rounds)
                scores, sources = through(view, model, tokens)
                assert sources == from_tier(tier), tier
                assert torch.equal(scores, wanted), tier
                assert cache.flush(60)
    with open_for(model, 64, tmp_path / "engine") as cache:
        wanted, _ = logits(Engine(model, BYTES, cache, reuse=False), tokens, new=3)
        engine = Engine(model, BYTES, cache)
        for tier, rounds in FROM_TIERS:
            push_out(cache, rounds)
            scores, sources = logits(engine, tokens, new=3)
            assert sources == from_tier(tier), tier
            assert torch.equal(scores, wanted), tier
            assert cache.flush(60)
        cache.check_integrity()


def test_mla_pages_hold_latents_and_nothing_else(tmp_path: Path) -> None:
    """What the model computes before it expands them: per layer 512 + 64 numbers a token, against 4 heads of 192 + 128."""
    model, tokens = model_of("deepseek"), words(2 * CHUNK)
    told: dict[int, list[torch.Tensor]] = {}
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.kv_a_proj_with_mqa.register_forward_hook(
            lambda module, given, output, number=number: told.setdefault(number, []).append(output.clone())
        )
    with open_for(model, 64, tmp_path / "disk") as cache:
        assert cache.layout.bytes_per_token == 2 * (512 + 64) * 4
        view = KINDS["KVC2StaticCache"](model.config, cache=cache)
        through(view, model, tokens, new=1)
        with cache.lease(tokens, leave=0, must=True) as lease:
            assert lease.wait() == 2 * CHUNK
            rows = torch.from_numpy(lease.rows).long()
            for number, layer in enumerate(model.model.layers):
                kept = view.get_k_cache(number)[rows].flatten(0, 1)[:, 0]
                computed = torch.cat([part[0] for part in told[number]])[: 2 * CHUNK]
                assert torch.equal(kept[:, :512], layer.self_attn.kv_a_layernorm(computed[:, :512]))
                assert not torch.equal(kept[1:, 512:], computed[1:, 512:])  # rotated
                assert torch.allclose(kept[:, 512:].norm(dim=-1), computed[:, 512:].norm(dim=-1), atol=1e-4)


@pytest.mark.parametrize("family", ["deepseek", "qwen3"])
def test_a_plain_forward_agrees(family: str) -> None:
    """The reference itself, against one forward of the whole prompt."""
    model, tokens = model_of(family, 2), words(PROMPT)
    with torch.inference_mode():
        whole = model(torch.tensor([tokens])).logits[0, -1]
    assert torch.allclose(recomputed(model, tokens, new=1)[0], whole, atol=1e-4)


def test_a_changed_latent_shows(tmp_path: Path) -> None:
    """That the comparison above would notice."""
    model, tokens = model_of("deepseek"), words(PROMPT)
    with open_for(model, 64, tmp_path / "disk") as cache:
        view = KINDS["KVC2StaticCache"](model.config, cache=cache)
        through(view, model, tokens)
        view.get_k_cache(1)[:, 5].mul_(1.001)
        assert not torch.equal(through(view, model, tokens)[0], recomputed(model, tokens))
