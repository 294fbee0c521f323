"""Attention on pages for devices other than the CPU: a paged flash kernel where one is installed, else gather and SDPA.

The gathered copy is one layer of the requests that run, never more. A request's past is one piece, whoever computed it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kvstrata.engine.attention import Pages, Rows, Slots
from kvstrata.gpu import SCRATCH_ROW, LayerViews


class DevicePages(Pages):
    """New tokens of one request, or one new token for each of several. Without a kernel the pages are gathered into `[batch,
    kv_heads, longest, head_dim]`.
    """

    def __init__(
        self,
        layers: Sequence[LayerViews],
        tables: Sequence[Rows],
        starts: Sequence[int],
        ends: Sequence[int],
        page_size: int,
        kernel: Callable[..., Tensor] | None = None,
    ) -> None:
        """The new tokens of request `b` are `starts[b]..ends[b]`."""
        device = layers[0].k.device
        super().__init__(layers, Slots.of(tables, starts, ends, page_size, device))
        padded = np.full((len(tables), -(-max(ends) // page_size)), SCRATCH_ROW, np.int32)
        for line, rows, end in zip(padded, tables, ends, strict=True):
            pages = -(-end // page_size)
            line[:pages] = rows[:pages]
        self.kernel, self.longest = kernel, max(ends)
        self.tables = torch.from_numpy(padded).to(device)
        self.ends = torch.tensor(ends, dtype=torch.int32, device=device)
        self.beyond = (torch.arange(self.longest, device=device) >= self.ends[:, None])[:, None]  # `[batch, 1, longest]`

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        k, v = self.write(layer, key, value)
        if self.kernel:  # it follows the page tables itself
            options = {"cache_seqlens": self.ends, "block_table": self.tables, "softmax_scale": scale, "causal": True}
            return self.kernel(query.transpose(1, 2), k, v, **options)
        mask = causal_lower_right(query.shape[2], self.longest) if len(self.ends) == 1 else ~self.beyond[:, None]
        gqa = key.shape[1] != query.shape[1]
        out: Tensor = scaled_dot_product_attention(query, self._gathered(k), self._gathered(v), mask, scale=scale, enable_gqa=gqa)
        return out.transpose(1, 2)

    def _gathered(self, plane: Tensor) -> Tensor:
        states = plane[self.tables].flatten(1, 2)[:, : self.longest].transpose(1, 2)
        # What lies past an end was never written and may be anything: a NaN times a weight of zero would still be NaN.
        return states if len(self.ends) == 1 else states.masked_fill_(self.beyond[..., None], 0)


def paged_flash_kernel(page_size: int, dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor] | None:
    """flash-attn's kernel where it is installed and takes these pages: half precision on CUDA, a multiple of 256 tokens each."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or page_size % 256:
        return None
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return None
    kernel: Callable[..., Tensor] = flash_attn_with_kvcache
    return kernel
