"""A20: after a fine-tune, another revision or another RoPE nothing of before is found; the same weights elsewhere find theirs."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from identity_kit import CONFIG, WEIGHTS, identity, weights_folder
from support import PAGE, prompt, serve, settle
from tool_kit import kvstrata

from kvstrata.identity import Fingerprint, Identity, weights_fingerprint
from kvstrata.layout import PageLayout

TOKENS = prompt(5, seed=20)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return weights_folder(tmp_path / "model")


@pytest.fixture
def serve_as(open_cache: Any, tmp_path: Path) -> Any:
    """serve_as(folder, config changes): the hit of a new process with the model of that folder, all of it from disk."""

    def serve_it(folder: Path, **changes: Any) -> int:
        layout = PageLayout.from_config(CONFIG, page_size=PAGE, dtype="bfloat16")
        fingerprint = weights_fingerprint(folder, cache_dir=tmp_path / "fingerprints")
        one = Identity.of(CONFIG | {"_name_or_path": str(folder)} | changes, layout, fingerprint, label="tiny")
        cache = open_cache(gpu=8, cpu=8, disk=tmp_path / "disk", layout=layout, identity=one)
        served = serve(cache, TOKENS)
        settle(cache)
        assert served.hit == served.disk
        cache.close()
        return served.hit

    return serve_it


def test_stored_under_one_model_and_opened_as_others(serve_as: Any, model: Path, tmp_path: Path) -> None:
    whole = 4 * PAGE
    assert serve_as(model) == 0
    assert serve_as(model) == whole
    assert serve_as(model, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}) == 0
    saved = (model / "model-00002.safetensors").read_bytes()
    (model / "model-00002.safetensors").write_bytes(b"twp" * 1000)  # a fine-tune, or another revision, under the same name
    assert serve_as(model) == 0
    assert serve_as(model) == whole
    (model / "model-00002.safetensors").write_bytes(saved)
    assert serve_as(model) == whole
    moved = Path(shutil.move(model, tmp_path / "moved"))
    assert serve_as(moved) == whole


def test_both_are_listed_and_one_is_purged(serve_as: Any, model: Path, tmp_path: Path) -> None:
    serve_as(model)
    shutil.copytree(model, tmp_path / "tuned")
    (tmp_path / "tuned" / "model-00001.safetensors").write_bytes(b"other" * 600)
    serve_as(tmp_path / "tuned")
    spaces = kvstrata("inspect", tmp_path / "disk", "--json").json["namespaces"]
    assert [(space["model"], space["pages"]) for space in spaces] == [("tiny", 5)] * 2
    assert all(space["bytes"] > 0 and space["last_use"] >= space["oldest_use"] > 0 for space in spaces)
    shown = kvstrata("inspect", tmp_path / "disk").out
    assert all(space["namespace"][:8] in shown for space in spaces)
    assert kvstrata("purge", tmp_path / "disk", "--namespace", spaces[0]["namespace"], "--yes").status == 0
    assert sum(serve_as(folder) == 0 for folder in (model, tmp_path / "tuned")) == 1


def test_another_model_under_the_same_name_has_another_namespace() -> None:
    one = identity()
    spaces = {
        one.namespace(),
        identity(weights=Fingerprint("full", hashlib.sha256(b"fine-tuned").digest())).namespace(),
        identity(CONFIG | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}).namespace(),
        identity(CONFIG | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}).namespace(),
        identity(CONFIG | {"a_setting_of_the_future": 1}).namespace(),
        identity(weights=Fingerprint("sampled", WEIGHTS.digest)).namespace(),
        identity(weights=Fingerprint("memory", WEIGHTS.digest)).namespace(),
    }
    assert len(spaces) == 7
    moved = CONFIG | {"_name_or_path": "/elsewhere", "transformers_version": "9", "torch_dtype": "float32", "architectures": ["X"]}
    assert identity(moved).namespace() == one.namespace()
    assert replace(one, label="another name") == one
    assert replace(one, label="another name").namespace() == one.namespace()


def test_weights_count_by_content_wherever_they_are(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    one = weights_fingerprint(model, cache_dir=cache)
    assert one.kind == "full"
    moved = model.rename(tmp_path / "other name")
    (moved / "README.md").write_text("new")
    (moved / "optimizer.pt").write_bytes(b"state")
    (moved / "generation_config.json").write_text("{}")
    assert weights_fingerprint(str(moved), cache_dir=cache) == one
    (moved / "model-00002.safetensors").write_bytes(b"twp" * 1000)
    assert weights_fingerprint(moved, cache_dir=cache) != one
    (moved / "model-00002.safetensors").write_bytes(b"two" * 1000)
    assert weights_fingerprint(moved, cache_dir=cache) == one
    (moved / "modeling_tiny.py").write_text("code of the model")
    assert weights_fingerprint(moved, cache_dir=cache) != one
