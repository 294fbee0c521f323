"""A Hugging Face model that keeps its states in one of KTransformers' cache classes, as their users drive them: page table, forward
with update(), publish, reset. The reference is the same model with transformers' own cache, on the same grid of chunks.
"""

from collections.abc import Callable
from typing import Any

import torch
from engine_kit import MODELS, tiny_model
from pages import prompt
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from kvstrata.cache import Limits, PrefixCache
from kvstrata.identity import Fingerprint, Identity
from kvstrata.layout import PageLayout
from kvstrata.static_cache import KDeepSeekV3Cache, KGQACache, KVC2Qwen3Cache, KVC2StaticCache

CHUNK = 64
Expect = Callable[[int, int], None]  # told which positions the next forward computes
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (KVC2StaticCache, KVC2Qwen3Cache, KDeepSeekV3Cache, KGQACache)}
# DeepSeek-V3's own latent and head widths.
REAL_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_hidden_layers": 2}


def model_of(family: str, heads: int = 0) -> Any:
    """A small random model: DeepSeek-V3 with the real latent, or Qwen3 or Llama with so many KV heads."""
    if family == "deepseek":
        return tiny_model(family, **REAL_LATENT)
    changes = {"head_dim": 16} if "head_dim" in MODELS[family][2] else {"hidden_size": 48 * heads}
    return tiny_model(family, num_hidden_layers=2, num_attention_heads=2 * heads, num_key_value_heads=heads, **changes)


def open_for(model: Any, page_size: int, folder: Any, gpu: int = 20) -> PrefixCache:
    """Three small tiers. The same folder and model have the same pages in another process."""
    layout = PageLayout.from_config(model.config, page_size=page_size, dtype=model.dtype)
    identity = Identity.of(model.config, layout, Fingerprint("full", bytes(32)))
    limits = Limits(gpu, 3 * gpu, str(folder), 1 << 30)
    return PrefixCache(layout, limits, identity=identity, chunk=CHUNK, poison=True)


class ViewLayer(CacheLayerMixin):
    """One layer of one request. Its states go to the pages through update() and are read from the pages."""

    is_sliding = False

    def __init__(self, past: "ViewPast", layer: int) -> None:
        super().__init__()
        self.past, self.layer = past, layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        view, page_idx, page_offset = self.past.view, self.past.page_idx, self.past.page_offset
        where = {"page_idx": page_idx, "page_offset": page_offset}
        if isinstance(view, KDeepSeekV3Cache):
            view.update(key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), self.layer, page_idx, page_offset)
        elif view.get_v_cache(self.layer) is None:
            view.update(torch.cat((key_states, value_states), -1).transpose(1, 2), self.layer, where)
        else:
            view.update(key_states, value_states, self.layer, where, layout="bhqd")
        keys, values = (
            None if pool is None else self._read(pool) for pool in (view.get_k_cache(self.layer), view.get_v_cache(self.layer))
        )
        assert keys is not None
        if values is not None:
            return keys, values
        latent = key_states.shape[-1]
        return keys[..., :latent].contiguous(), keys[..., latent:].contiguous()

    def _read(self, pool: Tensor) -> Tensor:
        """`[1, heads, positions up to here, width]`."""
        return pool[self.past.table].flatten(0, 1)[: self.past.stop].transpose(0, 1)[None].contiguous()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.past.start + query_length, 0

    def get_seq_length(self) -> int:
        return self.past.start

    def get_max_length(self) -> int:
        return int(self.past.view.max_cache_len)


class ViewPast:
    """The past_key_values of one request with a lease."""

    def __init__(self, view: Any, lease: Any) -> None:
        self.view, self.lease = view, lease
        self.cache = Cache(layers=[ViewLayer(self, layer) for layer in range(len(view.k_cache))])

    def expect(self, start: int, stop: int) -> None:
        """The tokens of the next forward: where their states go, from the form of page table that the class has."""
        self.start, self.stop = start, stop
        if isinstance(self.view, KDeepSeekV3Cache | KGQACache):
            ints = [
                torch.tensor(one, dtype=torch.int32) for one in (range(start, stop), [0, stop - start], [0, len(self.lease.rows)])
            ]
            indices = torch.from_numpy(self.lease.rows.copy())
            real = torch.tensor([stop - start], dtype=torch.int32)
            self.page_idx, self.page_offset = self.view.get_page_table(*ints, indices, real)
            if isinstance(self.view, KGQACache):
                self.page_idx, self.page_offset = self.page_idx[None], self.page_offset[None]
        else:
            batch = self.view.mini_batch(prefill=[(self.lease, start, stop)])
            self.page_idx, self.page_offset = self.view.get_page_table(batch)
        self.table = torch.from_numpy(self.lease.rows).long()


def run(model: Any, tokens: list[int], new: int, first: int, past: Cache, expect: Expect) -> tuple[Tensor, list[int]]:
    """Prefill from `first` on, chunk by chunk on the grid, then `new` tokens. Logits of the last prompt token and of each new one,
    and all tokens."""
    told, everything = [], list(tokens)
    with torch.inference_mode():
        for start in range(first, len(tokens), CHUNK):
            told = [_step(model, everything, start, min(start + CHUNK, len(tokens)), past, expect)]
        for _ in range(new):
            everything.append(int(told[-1].argmax()))
            told.append(_step(model, everything, len(everything) - 1, len(everything), past, expect))
    return torch.stack(told), everything


def _step(model: Any, tokens: list[int], start: int, stop: int, past: Cache, expect: Expect) -> Tensor:
    expect(start, stop)
    ids, positions = torch.tensor([tokens[start:stop]]), torch.arange(start, stop)[None]
    logits: Tensor = model(ids, position_ids=positions, past_key_values=past, use_cache=True).logits
    return logits[0, -1].clone()


def recomputed(model: Any, tokens: list[int], new: int = 3) -> Tensor:
    """With transformers' own cache: the reference."""
    return run(model, tokens, new, 0, DynamicCache(config=model.config), lambda start, stop: None)[0]


def through(view: Any, model: Any, tokens: list[int], new: int = 3) -> tuple[Tensor, dict[str, int]]:
    """One session through a cache class: its logits, and the tokens reused by tier."""
    lease = view.lease(tokens, reserve=new, multiple=CHUNK)
    hit = lease.wait()
    sources = lease.sources
    past = ViewPast(view, lease)
    logits, everything = run(model, tokens, new, hit, past.cache, past.expect)
    lease.append(everything[len(tokens) :])
    lease.publish(len(everything), ready=view.cache.pool.mark_batch())
    view.reset()
    return logits, sources


def push_out(cache: PrefixCache, rounds: int) -> None:
    """Other requests that need every page of the device pool, so many times; what they compute does not matter."""
    for seed in range(rounds):
        tokens = prompt(cache.pool.pages - 1, 1000 + seed, cache.page_size)
        with cache.lease(tokens, must=True) as lease:
            lease.wait()
            lease.publish(len(tokens))
        assert cache.flush(60)
