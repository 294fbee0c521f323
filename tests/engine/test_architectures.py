"""Models of many families, unmodified: the same tokens as transformers' generate(), cold and reused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from engine_kit import BYTES, words

from kvstrata.cache import PrefixCache
from kvstrata.engine import Engine, Unsupported
from kvstrata.engine.runner import PagedRunner, PastRunner

COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": None,
}
GQA = {"intermediate_size": 64, "num_key_value_heads": 2}
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

MLA = MOE | {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "head_dim": 8, "qk_rope_head_dim": 8}


def tiny(family: str, **sizes: Any) -> Any:
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**(COMMON | sizes))
    model = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    return model(config).eval()


@pytest.mark.parametrize(
    ("family", "sizes", "runner"),
    [
        ("Qwen2", GQA, PagedRunner),
        ("Qwen3Moe", GQA | MOE | {"head_dim": 8}, PagedRunner),
        ("Mixtral", GQA | MOE | {"sliding_window": None}, PagedRunner),
        ("Gemma", GQA | {"head_dim": 16}, PagedRunner),
        ("Phi", {"intermediate_size": 64}, PagedRunner),
        ("GPTNeoX", {"intermediate_size": 64}, PagedRunner),
        ("GPT2", {}, PagedRunner),
        ("StableLm", GQA, PastRunner),  # hands no arguments down to its attention
        ("Falcon", {"alibi": False}, PastRunner),  # has attention of its own
        ("Bloom", {}, PastRunner),  # the same, and no RoPE
        ("DeepseekV2", MLA, PastRunner),
        ("Nemotron", GQA, PastRunner),  # says that its attention can be set, and hands no arguments down to it
        (
            "JetMoe",
            GQA | {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
            PastRunner,
        ),  # repeats K and V itself
        ("DiffLlama", GQA, PastRunner),  # attends twice in every layer
    ],
)
def test_same_tokens(family: str, sizes: dict[str, Any], runner: type, make_cache: Callable[..., PrefixCache]) -> None:
    model, prompts = tiny(family, **sizes), [words(90, seed=i) for i in range(3)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)  # else a random model says the same token again and again
    ids = torch.tensor(prompts)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[:, 90:].tolist()
    engine = Engine(model, BYTES, make_cache(model, chunk=32, gpu_pages=60))
    assert isinstance(engine.runner, runner)
    for reused in (0, 64):
        sequences = engine.generate(prompts, max_new_tokens=8)
        assert [sequence.error for sequence in sequences] == [None] * 3
        assert [sequence.output for sequence in sequences] == expected
        assert [sequence.stats.reused_tokens["gpu"] for sequence in sequences] == [reused] * 3


def test_a_model_is_left_as_it_was_where_it_does_not_attend_on_pages(make_cache: Callable[..., PrefixCache]) -> None:
    ids = torch.tensor([words(20)])
    other = tiny("GPT2", num_key_value_heads=2)  # which it does not have
    for model, refused in ((tiny("DiffLlama", **GQA), False), (other, True)):
        before, wanted = model.config._attn_implementation, model(ids).logits
        cache = make_cache(model)
        if refused:
            with pytest.raises(Unsupported, match="which the pages"):
                Engine(model, BYTES, cache)
        else:
            Engine(model, BYTES, cache)
        assert model.config._attn_implementation == before
        assert torch.equal(model(ids).logits, wanted)


def test_states_that_the_pages_do_not_hold_are_refused_at_once(make_cache: Callable[..., PrefixCache]) -> None:
    model = tiny("Bloom")
    other = tiny("Falcon", alibi=False, multi_query=True, new_decoder_architecture=False)
    with pytest.raises(ValueError, match=r"the model's states \(512 bytes per token in 2 layers\) are not those of the cache"):
        Engine(model, BYTES, make_cache(other))
    # The last guard, for a config that does not say how the model caches.
    with pytest.raises(Unsupported, match=r"caches states of shape \(1, 4, 1, 8\), which the pages \(41, 16, 1, 8\) do not hold"):
        PastRunner(model, make_cache(other))
