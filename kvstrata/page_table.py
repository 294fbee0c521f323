"""From logical positions to pages and offsets, for whole batches: no loop over tokens, and nothing that waits for the device.

Two forms of the same question: a mini-batch of prefill and decode requests with block tables, and tokens with index pointers.
"""

from typing import Any, NamedTuple

import torch

__all__ = ["MiniBatch", "from_indptr", "from_mini_batch"]

SCRATCH_ROW = 0  # where padding is written: never a page
Tables = tuple[torch.Tensor, torch.Tensor]


class MiniBatch(NamedTuple):
    """Requests of one forward. All tensors int32, on the pool's device.

    `p_q_len` `[Bp]`: new tokens per prefill request; `p_position_ids` `[sum of them]`: their absolute positions, request by
    request. `d_position_ids`: `[L]` for one decode request, else `[Bd, L]`. Block tables: page ids by logical page, `[Bp, n]` and
    `[Bd, n]`, as wide as the longest request needs. `max_q_len`: the largest of p_q_len, so that nobody has to ask the device.
    """

    prefill_batch: int
    p_q_len: torch.Tensor
    p_position_ids: torch.Tensor
    p_block_tables: torch.Tensor
    decode_batch: int
    d_position_ids: torch.Tensor
    d_block_tables: torch.Tensor
    max_q_len: int | None = None


def from_mini_batch(batch: Any, page_size: int, bsz_tensors: torch.Tensor | None, is_prefill: bool) -> Tables:
    """(page_idx, page_offset), int32: `[Bp, largest q_len]` for prefill, the shape of d_position_ids for decode.

    Padding maps to the scratch row, offset 0, and so does a position below 0 or past its block table. `bsz_tensors`: int32 `[1]`,
    the number of real tokens, in order; those after them are padding. Where q_len lies on a device and several requests have no
    max_q_len, their maximum is asked of the device. Raises ValueError for tensors whose shapes do not fit together.
    """
    return _prefill(batch, page_size, bsz_tensors) if is_prefill else _decode(batch, page_size, bsz_tensors)


def _prefill(batch: Any, page_size: int, real: torch.Tensor | None) -> Tables:
    lengths, positions, tables = batch.p_q_len, batch.p_position_ids, batch.p_block_tables
    requests = int(batch.prefill_batch)
    device = positions.device
    if requests == 0 or positions.numel() == 0:
        empty = torch.zeros((requests, 0), dtype=torch.int32, device=device)
        return empty, empty.clone()
    _check("p_q_len", lengths, (requests,))
    _check("p_block_tables", tables, (requests, tables.shape[-1]))
    longest = getattr(batch, "max_q_len", None)
    if longest is None:
        longest = positions.numel() if requests == 1 else int(lengths.max())
    lengths = lengths.long()[:, None]
    column = torch.arange(int(longest), device=device)[None, :]
    token = torch.cumsum(lengths, 0) - lengths + column  # its place in the flat order
    valid = column < lengths
    if real is not None:
        valid &= token < real
    position = positions[token.clamp(max=positions.numel() - 1)].long()
    return _translate(tables, position, valid, page_size)


def _decode(batch: Any, page_size: int, real: torch.Tensor | None) -> Tables:
    positions = batch.d_position_ids
    requests = int(batch.decode_batch)
    if requests == 0 or positions.numel() == 0:
        empty = torch.zeros(positions.shape, dtype=torch.int32, device=positions.device)
        return empty, empty.clone()
    if positions.numel() % requests or (positions.dim() > 1 and positions.shape[0] != requests):
        raise ValueError(
            f"d_position_ids has the shape {tuple(positions.shape)}, but must be [L] for one request, or [{requests}, L]"
        )
    _check("d_block_tables", batch.d_block_tables, (requests, batch.d_block_tables.shape[-1]))
    position = positions.reshape(requests, -1).long()
    valid = torch.ones_like(position, dtype=torch.bool)
    if real is not None:
        valid = torch.arange(position.numel(), device=position.device).view_as(position) < real
    page_idx, page_offset = _translate(batch.d_block_tables, position, valid, page_size)
    return page_idx.view(positions.shape), page_offset.view(positions.shape)


def _translate(tables: torch.Tensor, position: torch.Tensor, valid: torch.Tensor, page_size: int) -> Tables:
    """`tables` `[B, n]`, `position` and `valid` `[B, Q]`."""
    page, width = position // page_size, tables.shape[1]
    valid = valid & (position >= 0) & (page < width)
    found = tables.gather(1, page.clamp(0, max(width - 1, 0))) if width else torch.zeros_like(page, dtype=torch.int32)
    page_idx = torch.where(valid, found, SCRATCH_ROW).to(torch.int32)
    return page_idx, torch.where(valid, position % page_size, 0).to(torch.int32)


def from_indptr(
    cache_position: torch.Tensor,
    q_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    bsz_tensors: torch.Tensor,
    page_size: int,
) -> Tables:
    """(page_idx, page_offset), int32 `[N]`, one per token.

    `cache_position` `[N]`: absolute positions. `q_indptr` `[B + 1]`: where each request's tokens begin. `kv_indptr` `[B + 1]`:
    where its pages begin in `kv_indices`. `bsz_tensors` `[1]`: the number of real tokens. What is padding, or past its request's
    pages, is in the scratch row, and so is a position below 0, at offset 0.
    """
    position = cache_position.long()
    page_offset = torch.where(position >= 0, position % page_size, 0).to(torch.int32)
    if kv_indices.numel() == 0 or position.numel() == 0:
        return torch.full_like(page_offset, SCRATCH_ROW), page_offset
    token = torch.arange(position.numel(), device=position.device)
    last = q_indptr.numel() - 2
    request = torch.searchsorted(q_indptr.long(), token, right=True) - 1
    inside = (position >= 0) & (request >= 0) & (request <= last) & (token < bsz_tensors)
    request = request.clamp(0, max(last, 0))
    place = kv_indptr.long()[request] + position // page_size
    inside &= place < kv_indptr.long()[request + 1]
    found = kv_indices[place.clamp(0, kv_indices.numel() - 1)]
    return torch.where(inside, found, SCRATCH_ROW).to(torch.int32), page_offset


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, but must be {list(shape)}")
