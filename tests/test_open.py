"""PrefixCache.open: what it takes from the model and the settings, what it tells, and what makes another model of it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support import PAGE, prompt, serve, settle  # noqa: E402

from kvstrata import PrefixCache  # noqa: E402
from kvstrata.config_file import ConfigError  # noqa: E402

SMALL = {"attn.page_size": PAGE, "attn.chunk_size": PAGE, "max_batch_size": 1, "kvc2.cpu_memory_size_GB": "1MiB"}


def make_model(seed: int = 1, **changes: Any) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=100)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | changes))).eval()


def opened(model: Any, root: Path, **options: Any) -> PrefixCache:
    return PrefixCache.open(model, SMALL | {"kvc2.disk_path": str(root), "kvc2.disk_size_GB": "4MiB"}, say=None, **options)


def namespace(model: Any, root: Path, **options: Any) -> bytes:
    with opened(model, root, **options) as cache:
        return cache.namespace()


def test_the_model_says_dtype_and_device() -> None:
    with PrefixCache.open(make_model().to(torch.bfloat16), SMALL, say=None) as cache:
        assert (cache.pool.dtype, cache.pool.device.type) == (torch.bfloat16, "cpu")
        assert cache.max_batch_size == 1
    with PrefixCache.open(make_model(), SMALL, dtype="float16", device="cpu:0", say=None) as cache:
        assert (cache.pool.dtype, cache.pool.device.type) == (torch.float16, "cpu")


def test_settings_in_effect_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_KVC2_IO_THREADS", "2")
    PrefixCache.open(make_model(), SMALL).close()
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("kvstrata: ") for line in lines)
    assert any("attn.page_size" in line and "16 tokens" in line and "[given]" in line for line in lines)
    assert any("kvc2.io_threads" in line and "[KVSTRATA_KVC2_IO_THREADS]" in line for line in lines)
    assert any("kvc2.disk_path" in line and "off" in line for line in lines)


@pytest.mark.parametrize("settings", [{"attn.page_size": 100}, {"kvc2.disk_pth": "/x"}, {"kvc2.cpu_memory_size_GB": "900TB"}])
def test_settings_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PrefixCache.open(make_model(), SMALL | settings, say=None)


def test_a_config_keeps_nothing_on_disk(tmp_path: Path) -> None:
    with opened(make_model().config, tmp_path / "disk") as cache:
        assert cache.limits.disk_path == ""


def test_the_weights_name_the_model(tmp_path: Path) -> None:
    root, folder, elsewhere = tmp_path / "disk", tmp_path / "model", tmp_path / "moved"
    make_model(1).save_pretrained(folder)
    make_model(1).save_pretrained(elsewhere)
    load = transformers.AutoModelForCausalLM.from_pretrained
    first = namespace(load(folder), root)
    assert namespace(load(elsewhere), root) == first  # a path is not part of it
    make_model(2).save_pretrained(elsewhere)
    assert namespace(load(elsewhere), root) != first
    assert namespace(make_model(1), root) == namespace(make_model(1), root) != namespace(make_model(2), root)


def test_tensors_that_were_changed_after_loading(tmp_path: Path) -> None:
    """A merged adapter, for one: the folder is the same, the model is not."""
    make_model().save_pretrained(tmp_path / "model")
    load = transformers.AutoModelForCausalLM.from_pretrained
    first, merged = load(tmp_path / "model"), load(tmp_path / "model")
    with torch.no_grad():
        merged.model.layers[1].self_attn.v_proj.weight += 0.01
    assert namespace(first, tmp_path / "disk") != namespace(merged, tmp_path / "disk")
    assert namespace(first, tmp_path / "disk") == namespace(load(tmp_path / "model"), tmp_path / "disk")


def test_a_model_made_from_a_folder_without_weights(tmp_path: Path) -> None:
    """Its tensors name it."""
    make_model().config.save_pretrained(tmp_path / "config")
    model = make_model()
    model.config._name_or_path = str(tmp_path / "config")
    assert namespace(model, tmp_path / "disk") == namespace(make_model(), tmp_path / "disk")


def test_defaults_of_torch_do_not_leak_in(tmp_path: Path) -> None:
    script = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from kvstrata import PrefixCache
config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=100)
model = LlamaForCausalLM(config).eval()
torch.set_default_device("meta")
with torch.inference_mode():
    cache = PrefixCache.open(model, {"max_batch_size": 1, "kvc2.cpu_memory_size_GB": "4MiB"}, say=None)
cache.pool.layers[0].k[1].fill_(1.0)
print(cache.pool.data.device, cache.pool.data.is_inference())
cache.close()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.split() == ["cpu", "False"]


def test_a_process_that_just_ends(open_cache: Any, tmp_path: Path) -> None:
    """Without close(): what was on its way to disk, here all of it, is written when the interpreter ends."""
    script = """
import atexit, sys
sys.path.insert(0, sys.argv[1])
from support import GatedDevice, prompt, serve, tiny_identity, tiny_layout
from kvstrata.cache import Limits, PrefixCache
layout, device = tiny_layout(), GatedDevice()
device.downs.clear()  # no page leaves the device, let alone for the disk
# Hooks run in reverse order: this one after the cache's own, which its constructor registers, and the gate's before it.
atexit.register(lambda: print(cache.stats()["disk"]["pages"]))
cache = PrefixCache(layout, Limits(80, 80, sys.argv[2], 4 << 20), identity=tiny_identity(layout), device=device)
atexit.register(device.downs.set)
serve(cache, prompt(64))
print(cache.stats()["disk"]["pages"])
sys.setswitchinterval(60)  # pages move only where a hook waits for them, not between two hooks
"""
    root = tmp_path / "disk"
    command = [sys.executable, "-c", script, str(Path(__file__).parent), str(root)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.split() == ["0", "64"]
    cache = open_cache(gpu=80, cpu=80, disk=root)
    assert serve(cache, prompt(64)).disk == 63 * PAGE
    settle(cache)


@pytest.mark.skipif(not os.environ.get("HOME"), reason="needs a home")
def test_an_unreadable_folder_of_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        opened(make_model(), tmp_path / "disk", weights=tmp_path / "nowhere")
