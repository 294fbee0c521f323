"""Tiny random models, a tokenizer of bytes and prompts made of them, for the engine's tests."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

COMMON = dict(
    hidden_size=48, intermediate_size=96, num_hidden_layers=3, vocab_size=256, max_position_embeddings=4096, eos_token_id=None
)
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, dict(num_attention_heads=6, num_key_value_heads=2)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)),
    "deepseek": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        dict(
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        ),
    ),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


BYTES = byte_tokenizer()


class Spell:
    """A logits processor that makes the model write `text` after a prompt of `prompt` tokens."""

    def __init__(self, text: str, prompt: int) -> None:
        self.tokens = BYTES(text)["input_ids"]
        self.prompt = prompt

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self.tokens[(ids.shape[1] - self.prompt) % len(self.tokens)]
        return torch.full_like(scores, float("-inf")).index_fill(1, ids.new_tensor([token]), 0.0)


class Recorder:
    """A logits processor that keeps what it sees, bit for bit."""

    def __init__(self) -> None:
        self.scores: list[torch.Tensor] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.scores.append(scores.clone())
        return scores


def words(count: int, seed: int = 0) -> list[int]:
    """A prompt of `count` tokens."""
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def tiny_model(name: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model that is the same on every call."""
    kind, config, sizes = MODELS[name]
    torch.manual_seed(7)
    return kind(config(**(COMMON | sizes | changes))).to(dtype).eval()


def expected(engine: Any, prompt: list[int], new: int) -> list[int]:
    """What transformers' generate() says, with the model's own attention."""
    before = engine.model.config._attn_implementation
    engine.model.set_attn_implementation("eager")
    out = engine.model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)
    engine.model.set_attn_implementation(before)
    return list(out[0, len(prompt) :].tolist())
