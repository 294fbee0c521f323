"""Attention straight on the pages of the pool, registered as a transformers attention function.

The past is read in *blocks*: tokens from an absolute multiple of the block's size on, whoever computed them. So a prefix that was
restored is attended in exactly the pieces in which it would be attended had it just been computed, and gives the same bits.

Measured on the CPU (SmolLM2's shape, 2,048 tokens): a decoding token is bound by memory, so its blocks are a chunk long and a block
of one page is read in place; small pages are gathered (13 us for K and V of 16 pages of 16 tokens, against 30 us for the attention;
attending each page on its own costs 5 times as much). A prefill chunk is bound by arithmetic and gathers blocks of 1,024 tokens:
attention takes 12 % (float32) to 25 % (bfloat16) less time than on pages of 256 tokens in place, since there is less to merge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstrata.gpu import LayerViews

if TYPE_CHECKING:
    from kvstrata.lease import Lease

NAME = "kvstrata"
PREFILL_BLOCK = 1024  # tokens
GATHER = 8  # blocks of small pages gathered at once while decoding: the copy stays in the processor's cache

Rows = npt.NDArray[np.int32]


class Unsupported(ValueError):
    """The model needs something that attention on pages does not do. One sentence says what."""


def page_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    kv_pages: Pages | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls for every layer. Raises `Unsupported` for what it would otherwise ignore silently."""
    if kv_pages is None:
        raise Unsupported(f"attention {NAME!r} reads the KV states from pages: call the model through kvstrata.engine")
    if sliding_window is not None or softcap is not None or s_aux is not None:
        raise Unsupported(
            f"{type(module).__name__} uses a sliding window, soft-capped scores or attention sinks, which pages do not support yet"
        )
    scale, layer = query.shape[-1] ** -0.5 if scaling is None else scaling, int(module.layer_idx)  # type: ignore[arg-type]
    if kv_pages.arriving:
        kv_pages.arriving.wait(layer=layer)
    return kv_pages.attend(layer, query, key, value, scale), None


def register() -> None:
    """Make `model.set_attn_implementation(NAME)` work. No mask is ever built: pages before the query need none."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, page_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


# ---- the kernel: attention over one block, with the log-sum-exp that merging needs ----


def _composed_flash(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Public operators only; for a torch without the private one below."""
    scores = torch.matmul(query.float() * scale, key.float().transpose(-1, -2))
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    lse = scores.logsumexp(-1)
    return torch.matmul((scores - lse[..., None]).exp(), value.float()).to(query.dtype), lse


def _aten_flash(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return out, lse


Flash = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
flash: Flash = _aten_flash if hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu") else _composed_flash
"""`[1, h, q, d] x [1, h, n, d] -> ([1, h, q, d], fp32 [1, h, q])`, causal from the top left."""


# ---- blocks ----


@dataclass(frozen=True)
class Blocks:
    """The first `tokens` tokens of blocks that one call of the kernel reads: neighbouring rows viewed in place, or small pages
    gathered.
    """

    rows: slice | Tensor
    tokens: int

    @staticmethod
    def of(pages: Rows, tokens: int) -> Blocks:
        """`pages` `[blocks, pages per block]`; neighbouring rows where there is one page per block."""
        if pages.shape[1] == 1:
            return Blocks(slice(int(pages[0, 0]), int(pages[-1, 0]) + 1), tokens)
        return Blocks(torch.from_numpy(pages.astype(np.int64)), tokens)

    def read(self, plane: Tensor) -> Tensor:
        """`[pages, page_size, heads, dim]` -> `[blocks, heads, tokens, dim]`."""
        if isinstance(self.rows, slice):
            return plane[self.rows, : self.tokens].transpose(1, 2)
        gathered = plane.index_select(0, self.rows.view(-1)).view(len(self.rows), -1, *plane.shape[2:])
        return gathered[:, : self.tokens].transpose(1, 2)


@dataclass(frozen=True)
class Slots:
    """Where new tokens' KV go: int64 `[tokens]` pool rows and offsets within them."""

    rows: Tensor
    offsets: Tensor

    @staticmethod
    def of(tables: Sequence[Rows], starts: Sequence[int], ends: Sequence[int], page_size: int, device: torch.device) -> Slots:
        """Of the tokens `starts[b]..ends[b]` of every request `b`."""
        positions = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        rows = np.concatenate([table[at // page_size] for table, at in zip(tables, positions, strict=True)])
        offsets = np.concatenate(positions) % page_size
        return Slots(torch.from_numpy(rows.astype(np.int64)).to(device), torch.from_numpy(offsets).to(device))

    def write(self, plane: Tensor, states: Tensor) -> None:
        """`states` `[batch, heads, new, dim]`, batch-major, into `plane` `[pages, page_size, heads, dim]`."""
        plane[self.rows, self.offsets] = states.transpose(1, 2).flatten(0, 1)


# ---- one forward pass ----


class Pages(ABC):
    """What one forward pass needs to know of the page tables; reaches the attention function as the model's `kv_pages` argument."""

    arriving: Lease | None = None  # its pages are on their way: each layer is waited for just before it is read

    def __init__(self, layers: Sequence[LayerViews], slots: Slots) -> None:
        self.layers, self.slots = layers, slots

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put the new tokens' states into their pages; returns the layer's planes."""
        k, v = self.layers[layer].k, self.layers[layer].v
        self.slots.write(k, key)
        self.slots.write(v, value)
        return k, v

    @abstractmethod
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Write the new tokens' `key` and `value` to their pages, then attend to everything up to them.

        `query` is `[batch, heads, new, head_dim]`, `key` and `value` `[batch, kv_heads, new, head_dim]`; returns `[batch, new,
        heads, head_dim]`.
        """


# ---- on the CPU ----


class PrefillPages(Pages):
    """One request's tokens `start..stop`, `start` on the grid of `block` and `stop - start <= block`."""

    def __init__(self, layers: Sequence[LayerViews], rows: Rows, start: int, stop: int, page_size: int, block: int) -> None:
        if start % block:
            raise ValueError(f"prefill starts at token {start}, which is no multiple of {block}")
        super().__init__(layers, Slots.of([rows], [start], [stop], page_size, torch.device("cpu")))
        per_block, past = max(PREFILL_BLOCK, page_size) // page_size, rows[: start // page_size]
        groups = [past[first : first + per_block] for first in range(0, len(past), per_block)]
        self.past = [Blocks.of(pages[None], len(pages) * page_size) for pages in groups]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        k, v = self.write(layer, key, value)
        _, heads, new, dim = query.shape
        kv_heads = key.shape[1]
        group = heads // kv_heads
        out, lse = flash(query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), True, scale)
        if self.past:
            folded = query.reshape(1, kv_heads, group * new, dim)
            out, lse = out.float(), lse.view(1, heads, new)
            for block in self.past:
                more, more_lse = flash(folded, block.read(k), block.read(v), False, scale)
                more, more_lse = more.reshape(1, heads, new, dim).float(), more_lse.reshape(1, heads, new)
                out.lerp_(more, torch.sigmoid(more_lse - lse)[..., None])
                lse = torch.logaddexp(lse, more_lse)
        return out.to(query.dtype).transpose(1, 2)


class Reading(NamedTuple):
    """Blocks `indices` of the page tables of `members`, which are neighbours in the batch and have the same pages there."""

    members: slice
    indices: slice
    blocks: Blocks


def shared_readings(tables: Sequence[Rows], lengths: Sequence[int], page_size: int, block: int) -> list[Reading]:
    """Cover the first `lengths[b]` tokens of every table in few calls of the kernel, a page that neighbours share read once for
    all.
    """
    per_block = block // page_size
    found: dict[tuple[int, int, int], list[tuple[int, Rows]]] = {}  # (first member, end, tokens) -> blocks
    for index in range(-(-max(lengths) // block)):
        cuts = [
            (max(0, min(block, length - index * block)), rows[index * per_block :])
            for rows, length in zip(tables, lengths, strict=True)
        ]
        pages = [(n, rows[: -(-n // page_size)].tobytes()) for n, rows in cuts]
        for (n, same), members in groupby(range(len(tables)), pages.__getitem__):
            first, *others = members
            if n:
                found.setdefault((first, first + len(others) + 1, n), []).append((index, np.frombuffer(same, np.int32)))
    readings = []
    for (first, end, n), blocks in found.items():
        indices, rows = np.array([index for index, _ in blocks]), np.stack([pages for _, pages in blocks])
        near = np.diff(rows[:, 0]) == 1 if per_block == 1 else np.arange(1, len(blocks)) % GATHER != 0
        for run in np.split(np.arange(len(blocks)), np.flatnonzero(~near | (np.diff(indices) != 1)) + 1):
            readings.append(Reading(slice(first, end), slice(indices[run[0]], indices[run[-1]] + 1), Blocks.of(rows[run], n)))
    return readings


class DecodePages(Pages):
    """One new token for each of several requests. Pages that neighbours in the batch share are read once for all of them."""

    def __init__(
        self, layers: Sequence[LayerViews], tables: Sequence[Rows], lengths: Sequence[int], page_size: int, block: int
    ) -> None:
        """`lengths[b]` tokens precede the new one of request `b`."""
        ends = [n + 1 for n in lengths]
        super().__init__(layers, Slots.of(tables, lengths, ends, page_size, torch.device("cpu")))
        self.readings = shared_readings(tables, ends, page_size, block)
        self.blocks = max(lengths) // block + 1
        self.views: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        k, v = self.write(layer, key, value)
        batch, heads, _, dim = query.shape
        kv_heads = key.shape[1]
        if not self.views:
            self._prepare(query, kv_heads)
        self.queries.copy_(query.view(batch, kv_heads, heads // kv_heads, dim).transpose(0, 1))
        for (_, _, blocks), (folded, outs, lses) in zip(self.readings, self.views, strict=True):
            out, lse = flash(folded, blocks.read(k), blocks.read(v), False, scale)
            outs.copy_(out.view(outs.shape))
            lses.copy_(lse.view(lses.shape))
        merged = self.outs.mul_(torch.softmax(self.lses, 0)[..., None]).sum(0)
        return merged.transpose(0, 1).reshape(batch, 1, heads, dim).to(query.dtype)

    def _prepare(self, query: Tensor, kv_heads: int) -> None:
        """Where the layers, one after the other, put the queries, the heads of a KV head as rows, and the parts of their results.

        Made once: allocating for each layer and cutting views out of it for each call of the kernel would cost as much as small
        blocks do.
        """
        batch, heads, _, dim = query.shape
        options: Any = {"dtype": torch.float32, "device": query.device}
        self.queries = query.new_empty(kv_heads, batch, heads // kv_heads, dim)
        self.outs = torch.zeros(self.blocks, *self.queries.shape, **options)
        # For good where a request has no such block.
        self.lses = torch.full(self.outs.shape[:-1], float("-inf"), **options)
        for members, indices, _ in self.readings:
            folded = self.queries[:, members].flatten(1, 2).expand(indices.stop - indices.start, -1, -1, -1)
            self.views.append((folded, self.outs[indices, :, members], self.lses[indices, :, members]))
