"""vLLM's blocks and our pages: which models fit, and where a block lies in a page row.

A block is opaque: how tokens lie inside it is the attention backend's business, so it is never cut or joined. A row holds, layer by
layer and within a layer slice by slice, the page's blocks one after the other. Slices are the distinct parts of a block over the
tensor-parallel ranks: what ranks hold alike is there once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvstrata.layout import PageLayout, PlaneSpec, dtype_name

__all__ = ["BlockLayout", "Unsupported", "refusals"]

LARGEST_PAGE = 1024  # tokens


class Unsupported(ValueError):
    """This model, or this way to run it, cannot be cached; the text is one sentence that says why."""


@dataclass(frozen=True)
class BlockLayout:
    """`layers`: names, in the order of the row. `block_bytes`: of one rank's block, by layer. `ranks`: tensor-parallel; `slices` of
    them
    hold different bytes, consecutive ones the same."""

    layers: tuple[str, ...]
    block_bytes: tuple[int, ...]
    block_size: int
    blocks_per_page: int
    ranks: int
    slices: int
    dtype: str

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any, page_size: int, chosen: bool) -> "BlockLayout":
        """For a VllmConfig, its KVCacheConfig, and pages of `page_size` tokens; unless that was `chosen`, larger blocks make larger
        pages. Raises Unsupported."""
        for reason in refusals(vllm_config, kv_cache_config):
            raise Unsupported(f"kvstrata cannot cache this: {reason}")
        (group,) = kv_cache_config.kv_cache_groups
        specs = _layer_specs(group)
        block_size = group.kv_cache_spec.block_size
        if block_size > page_size and not chosen:
            page_size = block_size
        if page_size % block_size:
            raise Unsupported(
                f"attn.page_size {page_size} must be a multiple of vLLM's block size {block_size}: set one of them so "
                f"(--block-size, or attn.page_size, a power of two of at most {LARGEST_PAGE})"
            )
        ranks = vllm_config.parallel_config.tensor_parallel_size
        first = specs[0][1]
        return cls(
            tuple(name for name, _ in specs),
            tuple(spec.page_size_bytes for _, spec in specs),
            block_size,
            page_size // block_size,
            ranks,
            ranks // max(1, min(kv_cache_config.kv_tp_replicas, ranks)),
            dtype_name(first.dtype),
        )

    @property
    def page_size(self) -> int:
        return self.block_size * self.blocks_per_page

    def page_layout(self, tag: str) -> PageLayout:
        """Rows of such blocks. `tag`: what else decides the order of their bytes."""
        specs = [
            PlaneSpec(layer, f"slice{part}", "uint8", (size // self.block_size,))
            for layer, size in enumerate(self.block_bytes)
            for part in range(self.slices)
        ]
        return PageLayout.from_planes(specs, page_size=self.page_size, dtype=self.dtype, tag=tag)

    def slice_of(self, rank: int) -> int:
        return rank * self.slices // self.ranks

    def writes(self, rank: int) -> bool:
        """Whether this rank saves its slice; the others hold the same bytes."""
        return rank % (self.ranks // self.slices) == 0

    @cached_property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """Of a layer's slice in a row: `[layer][slice]`, in bytes."""
        layout = self.page_layout("offsets")
        return tuple(
            tuple(layout.plane(layer, f"slice{part}").offset for part in range(self.slices)) for layer in range(len(self.layers))
        )


def refusals(vllm_config: Any, kv_cache_config: Any) -> Iterator[str]:
    """Reasons why pages would be wrong or incomplete."""
    parallel = vllm_config.parallel_config
    for name, flag in (
        ("pipeline_parallel_size", "--pipeline-parallel-size"),
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        if getattr(parallel, name, 1) > 1:
            yield f"{flag} {getattr(parallel, name)} is not supported yet, only tensor and data parallelism"
            return
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.use_eagle():
        yield "a draft model that shares the KV cache (EAGLE, MTP) stores states that depend on the next token; use another method"
    kinds = [f"{type(group.kv_cache_spec).__name__} ({len(group.layer_names)} layers)" for group in kv_cache_config.kv_cache_groups]
    if len(kinds) != 1:
        fix = "--disable-hybrid-kv-cache-manager makes vLLM keep all tokens of sliding-window layers, which can be cached"
        yield f"the model has {len(kinds)} kinds of KV cache ({', '.join(kinds)}), and only full attention is supported; {fix}"
        return
    (group,) = kv_cache_config.kv_cache_groups
    for name, spec in _layer_specs(group):
        if not _full_attention(spec):
            yield f"layer {name} has a {type(spec).__name__}, and only full attention and MLA are supported"
            return
        if spec.page_size_bytes % spec.block_size:
            yield f"layer {name} has blocks of {spec.page_size_bytes} bytes for {spec.block_size} tokens: no whole number per token"
            return


def _layer_specs(group: Any) -> list[tuple[str, Any]]:
    """(layer, its spec), in the order of the group."""
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)  # layers of one kind that differ in width
    return [(name, group.kv_cache_spec if inner is None else inner[name]) for name in group.layer_names]


def _full_attention(spec: Any) -> bool:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    # Exactly these: what derives from them keeps something else, or only a part of the tokens.
    return type(spec) in (FullAttentionSpec, MLAAttentionSpec) and spec.tokens_per_state == 1
