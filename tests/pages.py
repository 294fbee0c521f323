"""A tiny layout, prompts, and *fingerprints*: what a test writes into a page instead of KV states. Needs no torch.

A fingerprint depends on namespace, all tokens up to the page's end, and layer. Bytes of another page, of a freed row or from half a
copy are never equal to it.
"""

import hashlib
from typing import Any

import numpy as np

from kvstrata.identity import Fingerprint, Identity
from kvstrata.layout import PageLayout, PlaneSpec

PAGE = 16  # tokens


def tiny_layout(page_size: int = PAGE, layers: int = 2, width: int = 16, dtype: str = "float32") -> PageLayout:
    """Planes k and v of (2, width / 2) per layer; with the defaults a row has 4,096 bytes."""
    specs = [PlaneSpec(layer, name, dtype, (2, width // 2)) for layer in range(layers) for name in ("k", "v")]
    return PageLayout.from_planes(specs, page_size=page_size, dtype=dtype, tag="test-rows")


def tiny_identity(layout: PageLayout, weights: bytes = bytes(32), config: dict[str, Any] | None = None, part: str = "") -> Identity:
    return Identity.of(config or {"model_type": "test"}, layout, Fingerprint("full", weights), part=part)


def prompt(pages: float, seed: int = 0, page_size: int = PAGE) -> np.ndarray:
    """Random tokens, int32: `pages` pages of them, or a part of one."""
    return np.random.default_rng(seed).integers(0, 30000, round(pages * page_size), np.int32)


def fingerprint(layout: PageLayout, space: bytes, prefix: Any) -> np.ndarray:
    """uint8 `[row_bytes]` of the page that ends with the last token of `prefix`."""
    name = hashlib.sha256(space + np.asarray(prefix, np.int32).tobytes()).digest()
    parts = [hashlib.shake_128(name + layer.to_bytes(4, "little")).digest(layout.layer_range(layer)[1]) for layer in layout.layers]
    return np.frombuffer(b"".join(parts), np.uint8)
