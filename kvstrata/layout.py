"""What a page row looks like: named planes, layer by layer, the same bytes in every tier.

A row holds `page_size` tokens of every layer. Its planes lie one behind the other without gaps, each `[page_size, *shape]` and
contiguous; the planes of a layer are neighbours, so that a layer is one range of bytes. Rows lie at `row_stride` in every tier.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from kvstrata.families import UnsupportedModel, kv_widths

__all__ = ["DTYPE_BYTES", "OWN_TAG", "PageLayout", "Plane", "PlaneSpec", "UnsupportedModel", "check_page_size", "dtype_name"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1}
ROW_ALIGNMENT = 4096  # a slab row goes to O_DIRECT as it is
OWN_TAG = "kvstrata-rows-1"  # of the layouts that from_config makes; an engine's own layout brings another


class PlaneSpec(NamedTuple):
    """A plane before it has its place in the row. `shape`: the width of one token, such as (kv_heads, head_dim)."""

    layer: int
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of one layer in a page row: `[page_size, *shape]` of `dtype`, contiguous, at byte `offset`."""

    layer: int
    name: str  # "k", "v", "latent", ...
    dtype: str
    shape: tuple[int, ...]  # of one token
    bytes_per_token: int
    offset: int
    bytes: int


@dataclass(frozen=True)
class PageLayout:
    """The planes of a page row and what follows from them. Made by `from_config` or `from_planes`.

    `dtype` names the KV dtype (single planes may have others, such as scales). `tag` says how an engine orders the bytes inside a
    plane, which shapes and strides alone cannot tell.
    """

    page_size: int
    dtype: str
    planes: tuple[Plane, ...]
    tag: str

    @classmethod
    def from_config(cls, config: Any, *, page_size: int = 256, dtype: Any = "bfloat16", simulator: bool = False) -> "PageLayout":
        """The layout for a model: a transformers config, or a dict or plain object with the same names.

        GQA: planes `k` and `v` of (kv_heads, head_dim) per layer. MLA: one plane `latent` of (1, kv_lora_rank + qk_rope_head_dim).
        `dtype`: a name or a torch dtype. `simulator` allows a page size of 1.
        Raises UnsupportedModel (one sentence) for models whose KV states cannot be reused page by page, ValueError for a bad page
        size or dtype.
        """
        name = dtype_name(dtype)
        specs = [
            PlaneSpec(layer, plane, name, shape)
            for layer, widths in enumerate(kv_widths(config))
            for plane, shape in widths.items()
        ]
        return cls.from_planes(specs, page_size=page_size, dtype=name, tag=OWN_TAG, simulator=simulator)

    @classmethod
    def from_planes(
        cls, specs: Iterable[PlaneSpec], *, page_size: int, dtype: Any, tag: str, simulator: bool = False
    ) -> "PageLayout":
        """The layout of an engine that declares its own planes, in the order of the row.

        `tag` is required: two orders of the same bytes can have equal shapes and strides. Raises ValueError.
        """
        check_page_size(page_size, simulator=simulator)
        if not tag:
            raise ValueError(
                "a layout needs a tag that names its order of bytes, since shapes cannot tell (for example 'vllm-flash-nhd')"
            )
        planes: list[Plane] = []
        offset = 0
        for spec in specs:
            if not spec.shape or min(spec.shape) < 1:
                raise ValueError(
                    f"plane {spec.name!r} of layer {spec.layer} has the shape {spec.shape}; every size must be at least 1"
                )
            name = dtype_name(spec.dtype)
            # R2: the only place where the bytes of a page are computed. Heads are part of the shape.
            per_token = prod(spec.shape) * DTYPE_BYTES[name]
            planes.append(Plane(spec.layer, spec.name, name, tuple(spec.shape), per_token, offset, page_size * per_token))
            offset += page_size * per_token
        order = [(plane.layer, plane.name) for plane in planes]
        if len(set(order)) != len(order) or order != sorted(order, key=lambda one: one[0]):
            raise ValueError("planes must come layer by layer, each (layer, name) once")
        if not planes:
            raise ValueError("a layout needs at least one plane")
        return cls(page_size, dtype_name(dtype), tuple(planes), tag)

    @cached_property
    def bytes_per_token(self) -> int:
        """KV bytes of one token over all planes."""
        return sum(plane.bytes_per_token for plane in self.planes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one page."""
        return self.bytes_per_token * self.page_size

    @property
    def row_stride(self) -> int:
        """Bytes from one row to the next, in every tier: row_bytes rounded up to 4096."""
        return -(-self.row_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def slot_bytes(self) -> int:
        """Bytes of one page on disk: its header and its row, as docs/disk-format.md has them."""
        header = 192 + 16 * len(self.planes) + 4 * self.page_size + 36 * max(16, self.page_size // 8) + 8
        return -(-header // ROW_ALIGNMENT) * ROW_ALIGNMENT + self.row_stride

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers that have planes, ascending."""
        return tuple(dict.fromkeys(plane.layer for plane in self.planes))

    @cached_property
    def _by_name(self) -> dict[tuple[int, str], Plane]:
        return {(plane.layer, plane.name): plane for plane in self.planes}

    def plane(self, layer: int, name: str) -> Plane:
        """Raises KeyError where the layout has no such plane."""
        return self._by_name[layer, name]

    def layer_planes(self, layer: int) -> tuple[Plane, ...]:
        """The planes of one layer in their order, empty where the layer has none."""
        return tuple(plane for plane in self.planes if plane.layer == layer)

    def layer_range(self, layer: int) -> tuple[int, int]:
        """(offset, bytes) of a layer in a row. Raises KeyError where the layer has no planes."""
        planes = self.layer_planes(layer)
        if not planes:
            raise KeyError(layer)
        return planes[0].offset, sum(plane.bytes for plane in planes)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def bytes_for(self, tokens: int) -> int:
        """Bytes that `tokens` tokens take in a tier: whole pages at row_stride."""
        return self.pages_for(tokens) * self.row_stride

    def pages_in(self, size: int) -> int:
        """Pages that fit in `size` bytes of a tier."""
        return max(size, 0) // self.row_stride

    def tokens_in(self, size: int) -> int:
        """Tokens that fit in `size` bytes of a tier."""
        return self.pages_in(size) * self.page_size


def check_page_size(page_size: int, *, simulator: bool = False) -> None:
    """Raises ValueError unless `page_size` is a power of two from 16 to 1024 (1 is allowed for the simulator)."""
    allowed = isinstance(page_size, int) and not isinstance(page_size, bool)
    if allowed and (16 <= page_size <= 1024 or (simulator and page_size == 1)) and page_size & (page_size - 1) == 0:
        return
    raise ValueError(f"page_size {page_size!r} must be a power of two from 16 to 1024 (16, 32, ... 1024); use 256 if in doubt")


def dtype_name(dtype: Any) -> str:
    """The name of a dtype given by name or as a torch dtype ("torch.bfloat16" -> "bfloat16"). Raises ValueError."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ValueError(f"dtype {name!r} is not supported; use one of {', '.join(DTYPE_BYTES)}")
    return name
