"""The real engine, a real model: whatever tier the states come from, the answers are those of vLLM's own prefix hit."""

import json

import numpy as np
import pytest
from real import BLOCK, PAGE, run_engine, transfer

pytestmark = pytest.mark.slow

LENGTH = 970
HIT = (LENGTH - 1) // PAGE * PAGE  # 960, a multiple of both block and page: what vLLM's own cache has, too
CLOSE = 5e-5  # log-probabilities, in float32 on one thread


def words(seed: int, length: int = LENGTH) -> list[int]:
    return np.random.default_rng(seed).integers(1000, 40000, length).tolist()


def ask(*prompts: list[int], **more: int) -> dict[str, object]:
    return {"do": "generate", "prompts": list(prompts), **more}


def same(one: dict[str, object], other: dict[str, object]) -> None:
    assert one["tokens"] == other["tokens"]
    assert np.abs(np.array(one["logprobs"]) - np.array(other["logprobs"])).max() <= CLOSE


def test_every_tier_answers_alike(smollm2_path, tmp_path):
    """Cold; vLLM's own hit; after a reset from the CPU tier; after real eviction; in a new process, and under vLLM's own processes,
    from disk; and in a process whose CPU tier is too small for anything but passing on."""
    a, b, c = words(1), words(2), words(3)
    first = run_engine(
        smollm2_path,
        [ask(a), ask(a), {"do": "reset"}, ask(a), ask(b), ask(c), ask(a), ask(b)],
        kv_transfer_config=transfer(tmp_path / "disk"),
    )
    cold, own, reset, cpu, b_cold, _, evicted, b_again = first["steps"]
    assert reset is True
    assert [one[0]["cached"] for one in (cold, own, cpu, evicted, b_again)] == [0, HIT, HIT, HIT, HIT]
    for hit in (own, cpu, evicted):
        same(hit[0], own[0])
    assert cold[0]["tokens"] == own[0]["tokens"]
    assert b_again[0]["tokens"] == b_cold[0]["tokens"]
    assert first["sources"] == {"device": HIT, "host": 3 * HIT}
    second = run_engine(
        smollm2_path, [ask(a), ask(b)], in_process=False, kv_transfer_config=transfer(tmp_path / "disk", policy=None, cpu="50MB")
    )
    same(second["steps"][0][0], own[0])
    assert [one[0]["cached"] for one in second["steps"]] == [HIT, HIT]
    assert second["sources"] == {"disk": 2 * HIT}


SHAPE = {
    "vocab_size": 49152,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "float32",
    "max_position_embeddings": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_attention_heads": 4,
}
LLAMA = SHAPE | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MLA = SHAPE | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "attention_bias": False,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
}
HYBRID = SHAPE | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 64,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "attention_bias": False,
}


def write(folder, config):
    """A tiny model whose weights are large enough that a wrong block changes the answer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.02 if "embed" in name else 0.5 if "lm_head" in name else 0.12)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))  # as its makers write it
    return folder


def test_mla(tmp_path):
    """The latent of MLA, from both tiers: what vLLM's own hit of the same length answers. Its CPU kernels want bfloat16, and blocks
    of 16 or 128 tokens, depending on the machine."""
    model, prompt = write(tmp_path / "mla", MLA), words(1, 390)
    settings = {
        "dtype": "bfloat16",
        "block_size": None,
        "num_gpu_blocks_override": 100,
        "kv_transfer_config": transfer(tmp_path / "disk", page=128),
    }
    first = run_engine(model, [ask(prompt), ask(prompt), {"do": "reset"}, ask(prompt)], **settings)
    cold, own, _, cpu = first["steps"]
    assert (cold[0]["cached"], own[0]["cached"], cpu[0]["cached"]) == (0, 384, 384)
    same(cpu[0], own[0])
    second = run_engine(model, [ask(prompt)], **settings)
    same(second["steps"][0][0], own[0])
    assert second["sources"] == {"disk": 384}


def test_a_hybrid_is_refused_with_what_to_do(tmp_path):
    """And does what it says there: with all tokens kept, its pages are cached, and its answers right."""
    model, prompt = write(tmp_path / "hybrid", HYBRID), words(1, 460)
    settings = {"num_gpu_blocks_override": 400, "kv_transfer_config": transfer(tmp_path / "disk")}
    with pytest.raises(AssertionError, match=r"kinds of KV cache .*--disable-hybrid-kv-cache-manager makes vLLM keep"):
        run_engine(model, [ask(prompt)], **settings)
    found = run_engine(
        model, [ask(prompt), ask(prompt), {"do": "reset"}, ask(prompt)], disable_hybrid_kv_cache_manager=True, **settings
    )
    cold, own, _, cpu = found["steps"]
    assert (cold[0]["cached"], own[0]["cached"], cpu[0]["cached"]) == (0, 448, 448)
    same(cpu[0], own[0])


def test_two_ranks(tmp_path):
    """Tensor parallelism under vLLM's own executor: two worker processes, one scheduler that owns the slab."""
    model, prompt = write(tmp_path / "llama", LLAMA), words(1)
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "in_process": False}
    first = run_engine(
        model, [ask(prompt), ask(prompt), {"do": "reset"}, ask(prompt)], kv_transfer_config=transfer(tmp_path / "disk"), **parallel
    )
    cold, own, _, cpu = first["steps"]
    assert (cold[0]["cached"], own[0]["cached"], cpu[0]["cached"]) == (0, HIT, HIT)
    assert cold[0]["tokens"] == own[0]["tokens"]
    same(cpu[0], own[0])
    alone = run_engine(model, [ask(prompt)], kv_transfer_config=transfer(tmp_path / "disk"))
    assert alone["steps"][0][0]["cached"] == 0, "slices of two ranks are no pages of one"
    assert HIT % BLOCK == 0
