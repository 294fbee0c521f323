"""What must be equal for two pages of vLLM's to be interchangeable: the model's side as an Identity, the request's as a Content.

vLLM's own block hashes hold neither the weights nor what an adapter contains, so they prove nothing here.
"""

import hashlib
import logging
from pathlib import Path
from typing import Any, NamedTuple

from kvstrata.arguments import MediaItem
from kvstrata.connect.vllm.blocks import BlockLayout
from kvstrata.fingerprint import Fingerprint, weights_fingerprint
from kvstrata.identity import Identity, canonical_json, config_digest
from kvstrata.layout import PageLayout

__all__ = ["Content", "content_of", "identity_of", "model_tag"]

log = logging.getLogger("kvstrata")
NO_WEIGHTS = {"dummy"}  # load formats without files: the weights are of this process alone


class Content(NamedTuple):
    """What besides its tokens decides a request's states. `adapter`: the LoRA request, whose content is still to be digested."""

    tenant: str | None
    adapter: Any
    media: tuple[MediaItem, ...]


def model_tag(vllm_config: Any, blocks: BlockLayout, worker: str) -> str:
    """How the bytes of a block come about, beyond weights and config. `worker`: what only the worker knows, see
    worker.layout_of."""
    from vllm import __version__

    model, cache = vllm_config.model_config, vllm_config.cache_config
    parts = {
        "engine": "vllm-" + ".".join(__version__.split("+")[0].split(".")[:2]),
        "block": blocks.block_size,
        "ranks": f"{blocks.ranks} of {blocks.slices} slices",
        "cache": str(cache.cache_dtype),
        "scales": bool(getattr(cache, "calculate_kv_scales", False)),
        "activations": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization),
        "worker": worker,
    }
    return canonical_json(parts)


def identity_of(vllm_config: Any, layout: PageLayout) -> Identity | None:
    """None where nothing names the weights: pages are then of this process alone, and none goes to disk.

    Reads all weights files once, then remembers their digests. Raises OSError.
    """
    model = vllm_config.model_config
    weights = _weights(vllm_config)
    if weights is None:
        return None
    config = {"hf": config_digest(model.hf_config).hex(), "task": str(model.runner_type)}
    return Identity.of(config, layout, weights, label=Path(str(model.model)).name)


def _weights(vllm_config: Any) -> Fingerprint | None:
    model = vllm_config.model_config
    if str(vllm_config.load_config.load_format) in NO_WEIGHTS:
        return None
    path = Path(model.model)
    try:
        if not path.exists():  # a name on the hub: the worker has loaded it, so it is in the hub's local cache
            from huggingface_hub import snapshot_download

            path = Path(snapshot_download(str(model.model), revision=model.revision, local_files_only=True))
        return weights_fingerprint(path)
    except (OSError, ValueError) as error:
        log.warning("no disk tier: the weights of %s cannot be read to name the pages they compute (%s)", model.model, error)
        return None


def content_of(request: Any, page_size: int) -> Content | None:
    """Of a vLLM Request; None where its pages cannot be told from others'."""
    media = [
        MediaItem(
            item.mm_position.offset, item.mm_position.length, _digest("media", f"{item.modality}\0{item.identifier}".encode())
        )
        for item in sorted(request.mm_features or (), key=lambda one: one.mm_position.offset)
    ]
    if request.prompt_embeds is not None:
        if media:
            return None  # they would lie on each other
        media = _embedded(request.prompt_embeds, page_size)
    end = 0
    for item in media:
        if item.offset < end or item.length < 1:
            return None
        end = item.offset + item.length
    return Content(request.cache_salt or None, request.lora_request, tuple(media))


def _embedded(embeds: Any, page_size: int) -> list[MediaItem]:
    """Embeddings stand in for tokens: page by page, one item with what they are."""
    import torch

    data = embeds.detach().cpu().contiguous()
    rows = data.reshape(len(data), -1).view(torch.uint8).numpy()
    kind = f"{data.dtype}\0{tuple(data.shape[1:])}\0".encode()
    return [
        MediaItem(at, min(page_size, len(rows) - at), _digest("embeds", kind + rows[at : at + page_size].tobytes()))
        for at in range(0, len(rows), page_size)
    ]


def _digest(what: str, content: bytes) -> bytes:
    return hashlib.sha256(f"kvstrata/vllm-{what}/1\0".encode() + content).digest()
