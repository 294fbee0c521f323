"""A model in words, and identities of it that differ in what a test names."""

import hashlib
from pathlib import Path
from typing import Any

from kvstrata.identity import Fingerprint, Identity
from kvstrata.layout import PageLayout

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
SECRET = bytes(range(32))
WEIGHTS = Fingerprint("full", hashlib.sha256(b"weights").digest())


def identity(config: dict[str, Any] = CONFIG, weights: Fingerprint = WEIGHTS, **layout: Any) -> Identity:
    options = {"page_size": 16, "dtype": "bfloat16"} | layout
    return Identity.of(config, PageLayout.from_config(config, **options), weights, label="tiny")


def weights_folder(folder: Path) -> Path:
    """A model's folder with weights in two files; returns it."""
    folder.mkdir()
    (folder / "model-00001.safetensors").write_bytes(b"one" * 1000)
    (folder / "model-00002.safetensors").write_bytes(b"two" * 1000)
    (folder / "config.json").write_text("{}")
    return folder
