"""The cache classes that KTransformers describes, as views of one page pool: docs/ktransformers.md.

    cache = KVC2StaticCache(config=config, max_batch_size=8, page_size=256, dtype=torch.bfloat16, device="cuda:0")
    page_idx, page_offset = cache.get_page_table(mini_batch, bsz_tensors=None, is_prefill=True)
    cache.update(combined, layer_idx=3, cache_kwargs={"page_idx": page_idx, "page_offset": page_offset})
    cache.reset()

A caller without leases owns all pages but the scratch row 0 and names them by their rows. With leases (`lease`, `mini_batch`) pages
come from every tier: asking for the page table brings them to the device.
"""

from collections.abc import Mapping
from typing import Any

import torch

from kvstrata.families import kv_widths
from kvstrata.page_table import MiniBatch
from kvstrata.pool_view import IndptrView, MiniBatchView, PoolView

__all__ = ["KDeepSeekV3Cache", "KGQACache", "KVC2Qwen3Cache", "KVC2StaticCache", "MiniBatch"]


class KVC2StaticCache(MiniBatchView):
    """MLA models: one latent per token. Made with the config of a GQA model it is a KVC2Qwen3Cache."""

    def __new__(cls, config: Any, *arguments: Any, **options: Any) -> "KVC2StaticCache":
        gqa = cls is KVC2StaticCache and "latent" not in kv_widths(config)[0]
        return object.__new__(KVC2Qwen3Cache if gqa else cls)

    def update(self, combined: torch.Tensor, layer_idx: int, cache_kwargs: Mapping[str, torch.Tensor]) -> Any:
        """Writes latents, `[B, Q, 1, kv_lora_rank + qk_rope_head_dim]`, where page_idx and page_offset `[B, Q]` say. (the layer's
        pool, page_idx). Raises ValueError for another shape or dtype."""
        pool, page_idx = self.k_cache[layer_idx], cache_kwargs["page_idx"]
        _write(pool, combined, page_idx, cache_kwargs["page_offset"])
        return pool, page_idx


class KVC2Qwen3Cache(KVC2StaticCache):
    """GQA models: K and V per head."""

    mla = False

    def update(  # type: ignore[override]  # the description has other arguments for this family
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_idx: int,
        cache_kwargs: Mapping[str, torch.Tensor],
        layout: str = "bqhd",
    ) -> Any:
        """Writes K and V, `[B, Q, heads, dim]`, or with layout="bhqd" `[B, heads, Q, dim]`, where page_idx and page_offset `[B, Q]`
        say. (K pool, V pool) of the layer. Raises ValueError for another shape, dtype or layout."""
        return _update_heads(self, key, value, layer_idx, cache_kwargs, layout)


class KGQACache(IndptrView):
    """GQA models. The attention may write by itself; update() is there for those that do not."""

    mla = False

    def update(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_idx: int,
        cache_kwargs: Mapping[str, torch.Tensor],
        layout: str = "bqhd",
    ) -> Any:
        """As KVC2Qwen3Cache.update; leading dimensions as those of page_idx."""
        return _update_heads(self, key, value, layer_idx, cache_kwargs, layout)


class KDeepSeekV3Cache(IndptrView):
    """MLA models."""

    mla = True

    def update(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_idx: int,
        page_idx: torch.Tensor,
        page_offset: torch.Tensor,
        cache_kwargs: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Writes `key` `[.., 1, kv_lora_rank]` and `value` `[.., 1, qk_rope_head_dim]` side by side. The layer's pool. Raises
        ValueError for another shape or dtype."""
        pool = self.k_cache[layer_idx]
        _write(pool, torch.cat((key, value), -1), page_idx, page_offset)
        return pool


def _update_heads(
    cache: PoolView, key: torch.Tensor, value: torch.Tensor, layer_idx: int, where: Mapping[str, torch.Tensor], layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if layout not in ("bqhd", "bhqd"):
        raise ValueError(f"layout is {layout!r}, but must be 'bqhd' or 'bhqd'")
    if layout == "bhqd":
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    keys, values = cache.k_cache[layer_idx], cache.v_cache[layer_idx]
    assert values is not None
    _write(keys, key, where["page_idx"], where["page_offset"])
    _write(values, value, where["page_idx"], where["page_offset"])
    return keys, values


def _write(pool: torch.Tensor, states: torch.Tensor, page_idx: torch.Tensor, page_offset: torch.Tensor) -> None:
    if states.dtype != pool.dtype:
        raise ValueError(f"the states are {states.dtype}, but the pool is {pool.dtype}: make the cache with dtype={states.dtype}")
    flat = page_idx.numel()
    if states.shape[-2:] != pool.shape[-2:] or states.numel() != flat * pool.shape[-2] * pool.shape[-1]:
        shape = [*page_idx.shape, *pool.shape[-2:]]
        raise ValueError(f"the states have the shape {list(states.shape)}, but must be {shape} for these positions")
    pool[page_idx.reshape(-1), page_offset.reshape(-1)] = states.reshape(flat, *pool.shape[-2:])
