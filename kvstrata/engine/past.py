"""Cache layers on the page pool, for models whose attention does not go through our function (DeepSeek's MLA caches latents, for
one).

The model gets a request's states as `past_key_values`. A layer holds them in one contiguous buffer: restored from the pool's pages
at the first use, appended to by every forward, and every appended token goes to its page at once. So pages are complete when they
are published, and one request runs at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvstrata.engine.attention import Rows, Slots, Unsupported


class PastLayer(CacheLayerMixin):
    """One layer of one request. `planes`: K and V, or one plane that holds both side by side, each `[pages, page_size, heads,
    width]`.
    """

    is_sliding = False

    def __init__(self, planes: Sequence[Tensor], rows: Tensor, past: int, limit: int) -> None:
        """Tokens `0..past` lie in the pages `rows` (int64); `limit` tokens are the most there will be."""
        super().__init__()
        self.planes = planes
        self.rows = rows
        self.length = past
        self.limit = limit
        self.slots: Slots | None = None  # of the tokens of the forward pass under way; set by PastPages

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        width = key_states.shape[-1]
        halves = self.planes if len(self.planes) == 2 else (self.planes[0][..., :width], self.planes[0][..., width:])
        for plane, states in zip(halves, (key_states, value_states), strict=True):
            if (plane.shape[-2], plane.shape[-1]) != (states.shape[1], states.shape[-1]):
                raise Unsupported(
                    f"the model caches states of shape {tuple(states.shape)}, which the pages {tuple(plane.shape)} do not hold"
                )
        self.planes = halves
        self.keys, self.values = (self._restored(plane) for plane in halves)
        self.dtype, self.device = self.keys.dtype, self.keys.device
        self.is_initialized = True

    def _restored(self, plane: Tensor) -> Tensor:
        buffer = plane.new_empty(1, plane.shape[2], self.limit, plane.shape[3])
        pages = plane.index_select(0, self.rows[: -(-self.length // plane.shape[1])])
        buffer[0, :, : self.length] = pages.flatten(0, 1)[: self.length].transpose(0, 1)
        return buffer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append `[1, heads, new, width]` states; returns all of them up to here."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[-2]
        assert self.slots is not None
        for buffer, plane, states in zip((self.keys, self.values), self.planes, (key_states, value_states), strict=True):
            buffer[:, :, start : self.length] = states
            self.slots.write(plane, states)
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.limit


class PastPages:
    """The states of one request: `cache` is what the model takes as `past_key_values`."""

    def __init__(self, layers: Sequence[Sequence[Tensor]], rows: Rows, past: int, limit: int, page_size: int) -> None:
        self.rows, self.page_size = rows, page_size
        self.device = layers[0][0].device
        table = torch.from_numpy(rows.astype("int64")).to(self.device)
        self.layers = [PastLayer(planes, table, past, limit) for planes in layers]
        self.cache = Cache(layers=self.layers)

    def expect(self, start: int, stop: int) -> None:
        """The next forward pass brings the tokens `start..stop`. What a pass that failed brought of them before is forgotten.
        Raises ValueError where they do not follow the ones before."""
        if start > min(layer.length for layer in self.layers):
            raise ValueError(f"token {start} does not follow the {self.layers[0].length} tokens computed so far")
        slots = Slots.of([self.rows], [start], [stop], self.page_size, self.device)
        for layer in self.layers:
            layer.slots, layer.length = slots, start
