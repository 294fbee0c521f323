"""A15: pages of an adapter are its own, by its content: weights, settings and scale, whatever it is called."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from identity_kit import identity
from support import PAGE, crowd, prompt, serve, settle

from kvstrata.identity import adapter_digest


def write_adapter(root: Path, name: str, weights: bytes, alpha: float = 16) -> Path:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": alpha, "base_model_name_or_path": str(folder)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, bytes | None]:
    """Digests of adapters that people confuse."""
    cache = tmp_path / "fingerprints"
    a = write_adapter(tmp_path, "a", b"weights of a")
    return {
        "none": None,
        "a": adapter_digest(a, cache_dir=cache),
        "a at half its scale": adapter_digest(a, scale=0.5, cache_dir=cache),
        "b": adapter_digest(write_adapter(tmp_path, "b", b"weights of b"), cache_dir=cache),
        "new weights, called a": adapter_digest(write_adapter(tmp_path, "a", b"new weights, called a"), cache_dir=cache),
        "another alpha": adapter_digest(write_adapter(tmp_path, "a", b"weights of a", alpha=8), cache_dir=cache),
    }


def test_namespaces_count_by_content(adapters: dict[str, bytes | None], tmp_path: Path) -> None:
    one = identity()
    spaces = {name: one.namespace(adapter=digest) for name, digest in adapters.items()}
    assert len(set(spaces.values())) == len(adapters) == 6
    elsewhere = write_adapter(tmp_path / "elsewhere", "other name", b"weights of a")
    assert one.namespace(adapter=adapter_digest(elsewhere, cache_dir=tmp_path / "c")) == spaces["a"]
    assert one.namespace(adapter=SimpleNamespace(digest=adapters["a"], name="anything")) == spaces["a"]
    for by_name in ("a", b"a", SimpleNamespace(name="a"), 1):
        with pytest.raises(TypeError, match="32-byte digest of its content"):
            one.namespace(adapter=by_name)


@pytest.mark.parametrize("tier", ["gpu", "cpu", "disk", "restart"])
def test_no_hit_across_adapters(open_cache: Any, tmp_path: Path, adapters: dict[str, bytes | None], tier: str) -> None:
    """The same tokens under all of them, one after the other: each computes its own, and finds just that when it comes again."""
    tokens = prompt(4, seed=15)
    rows = {"gpu": (32, 32), "cpu": (6, 200)}.get(tier, (6, 12))
    cache = open_cache(*rows, disk=tmp_path / "disk")
    for turn, hit in enumerate((0, 3 * PAGE)):
        for number, (name, adapter) in enumerate(adapters.items()):
            served = serve(cache, tokens, adapter=adapter)
            assert served.hit == hit, name
            assert hit == 0 or getattr(served, "disk" if tier == "restart" else tier) == hit
            settle(cache)
            if tier == "restart":
                cache.close()
                cache = open_cache(*rows, disk=tmp_path / "disk")
            elif tier != "gpu":
                crowd(cache, 1 if tier == "cpu" else 3, seed=1000 * (1 + turn) + 10 * number)
