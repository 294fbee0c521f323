"""From a model and the settings to a cache: what PrefixCache.open does."""

import hashlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstrata.arguments import check_whole
from kvstrata.capacity import Capacity
from kvstrata.config import KEYS, Settings
from kvstrata.fingerprint import Fingerprint, FingerprintTask, weights_fingerprint
from kvstrata.identity import Identity
from kvstrata.layout import PageLayout
from kvstrata.limits import Limits

if TYPE_CHECKING:
    from kvstrata.cache import PrefixCache

__all__ = ["Source", "device_free", "limits_of", "open_cache", "open_view", "say_on_stderr"]

Source = Settings | str | Path | Mapping[str, Any] | None
SAMPLES = 256  # values of a tensor that tell whether it is the one in the files
ACTIVATIONS = 1 << 30  # bytes of device memory that a forward pass of the engine is given room for


def say_on_stderr(line: str) -> None:
    """Where the settings in effect are printed."""
    print(f"kvstrata: {line}", file=sys.stderr)


def limits_of(capacity: Capacity) -> Limits:
    """What PrefixCache is told of the tiers in effect."""
    settings = capacity.settings.kvc2
    return Limits(
        gpu_pages=capacity.gpu.pages,
        cpu_pages=capacity.cpu.pages if capacity.cpu else 0,
        disk_path=str(capacity.disk_path) if capacity.disk else "",
        disk_group=settings.disk_group,
        disk_bytes=capacity.disk.bytes if capacity.disk else 0,
        disk_reserve_bytes=capacity.disk_reserve_bytes,
        io_threads=settings.io_threads,
        load_deadline=settings.load_deadline_s,
    )


def open_cache(
    kind: "type[PrefixCache]",
    model: Any,
    settings: Source,
    *,
    device: str | None,
    dtype: Any,
    weights: Fingerprint | FingerprintTask | str | Path | None,
    activations: int,
    say: Callable[[str], None] | None,
    identity: Identity | None = None,
) -> "PrefixCache":
    """See PrefixCache.open. `identity`: what the pages are of, where the caller knows it."""
    check_whole("activations", activations, 0, 1 << 62, "bytes")
    if not isinstance(weights, Fingerprint | FingerprintTask | str | Path | None):
        raise ValueError(f"weights is {weights!r}, but must be a folder, a Fingerprint or a FingerprintTask")
    if isinstance(weights, str | Path) and not Path(weights).exists():
        raise ValueError(f"weights is {str(weights)!r}, which does not exist: give the model's folder, or leave it out")
    if model is None or isinstance(model, str | Path | int):
        raise ValueError(f"model must be a loaded transformers model, or its config, not {model!r}")
    if say is not None and not callable(say):
        raise ValueError(f"say is {say!r}, but must be called with a line, or None for silence")
    if not isinstance(settings, Settings):
        settings = Settings.load(settings)
    config = getattr(model, "config", model)
    place = str(getattr(model, "device", "cpu") if device is None else device)
    if place.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device {place!r} is not supported; use 'cpu' or 'cuda[:index]'")
    place = "cpu" if place.startswith("cpu") else place
    kind_of_number = dtype or getattr(model, "dtype", None) or getattr(config, "dtype", None) or "float32"
    layout = PageLayout.from_config(config, page_size=settings.attn.page_size, dtype=kind_of_number)
    capacity = settings.resolve(layout, device=place, device_free_bytes=device_free(place, activations))
    for line in capacity.banner() if say else ():
        assert say is not None
        say(line)
    if (
        capacity.disk and identity is None
    ):  # the other tiers end with this process: they need no name that another one would understand
        found = _fingerprint(model, weights)
        if found is not None:
            identity = Identity.of(config, layout, found, label=Path(str(getattr(config, "_name_or_path", ""))).name)
    cache = kind(layout, limits_of(capacity), identity=identity, device=place, chunk=settings.chunk)
    cache.max_batch_size = settings.max_batch_size
    return cache


def open_view(
    kind: "type[PrefixCache]",
    config: Any,
    settings: Source,
    page_size: int,
    max_batch_size: int,
    dtype: Any,
    device: Any,
    model: Any,
    identity: Identity | None,
) -> "PrefixCache":
    """The cache under one of the classes of static_cache.py: what these are given wins over the settings."""
    import torch

    if device is None and model is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(settings, Settings):
        settings = {key: settings.value(key) for key in KEYS if settings.origin(key) != "default"}
    chosen = Settings.load(settings, {"attn.page_size": page_size, "max_batch_size": max_batch_size})
    return open_cache(
        kind,
        config if model is None else model,
        chosen,
        device=None if device is None else str(device),
        dtype=dtype,
        weights=None,
        activations=ACTIVATIONS,
        say=None,
        identity=identity,
    )


def device_free(device: str, activations: int) -> int | None:
    """Bytes of device memory that a model there leaves when its forward passes are given so much room; None on the CPU. Raises
    ValueError."""
    if device.partition(":")[0] != "cuda":
        return None
    try:
        import torch
    except ImportError:
        raise ValueError(f"device {device!r} needs the package torch: pip install 'kvstrata[engine]', or use cpu") from None
    if not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for, but torch sees no CUDA device; use device='cpu'")
    free, _ = torch.cuda.mem_get_info(device)
    return max(int(free) - activations, 0)


def _fingerprint(model: Any, weights: Fingerprint | FingerprintTask | str | Path | None) -> Fingerprint | None:
    match weights:
        case Fingerprint():
            return weights
        case FingerprintTask():
            return weights.result()
        case str() | Path():
            return weights_fingerprint(weights)
    if not hasattr(model, "state_dict"):
        return None
    folder = Path(str(getattr(model.config, "_name_or_path", "")))
    if not folder.is_dir() or str(folder) == ".":
        return weights_fingerprint(model)
    # The folder's digest is remembered between runs; that of tensors in memory is not. But the tensors are what computes: a merged
    # adapter or other weights loaded over them make another model.
    try:
        found = weights_fingerprint(folder)
    except FileNotFoundError:  # a model that was made from a config alone
        return weights_fingerprint(model)
    return Fingerprint(found.kind, hashlib.sha256(found.digest + _sample(model)).digest())


def _sample(model: Any) -> bytes:
    """A digest of some values of every tensor, evenly spread: cheap, and changed by whatever changes a tensor as a whole."""
    import torch

    digest = hashlib.sha256()
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            flat = tensor.detach().flatten()
            some = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].contiguous().cpu()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.digest()
