"""S7: the config file people have, KTransformers' own included; what is in effect, and where it came from."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tool_kit import kvstrata

from kvstrata.cache import PrefixCache
from kvstrata.cli.config import reference
from kvstrata.config import KEYS, ConfigError, Settings

# The sections and keys of a config.yaml of KTransformers 0.3 that serves with its prefix cache.
THEIRS = """
log: {dir: logs, file: server.log, level: debug, backup_count: -1}
server: {ip: 0.0.0.0, port: 10002}
db: {type: sqllite, database: server.db, host: ./, pool_size: 10}
user: {secret_key: abc, algorithm: HS256}
model:
  type: balance_serve
  name: DeepSeek-V3
  path: deepseek-ai/DeepSeek-V3
  gguf_path: ./DeepSeek-V3-GGUF
  device: cuda:0
  cache_lens: 16384
  max_new_tokens: 500
web: {mount: false, open_cross_domain: true}
ext: {cpu_infer: 10}
long_context: {max_seq_len: 32000, block_size: 128, token_step: }
local_chat: {prompt_file: ""}
async_server: {sched_strategy: FCFS, sched_port: 56441, kvc2_metrics_port: 54391, max_batch_size: 4}
attn:
  page_size: 16
  chunk_size: 256
kvc2:
  gpu_only: false
  utilization_percentage: 1.0
  cpu_memory_size_GB: %s
  disk_path: %s
"""
OTHERS = ("log", "server", "db", "user", "model", "web", "ext", "long_context", "local_chat", "async_server")
MODEL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 16}


@pytest.fixture
def theirs(tmp_path: Path) -> Any:
    def write(memory: Any, disk: Any) -> Path:
        (tmp_path / "config.yaml").write_text(THEIRS % (memory, disk))
        return tmp_path / "config.yaml"

    return write


def test_their_file_is_read(theirs: Any, tmp_path: Path) -> None:
    settings = Settings.load(theirs(0.01, tmp_path / "kvc"), environ={})
    assert settings.others == OTHERS
    assert (settings.attn.page_size, settings.kvc2.gpu_only, settings.kvc2.utilization_percentage) == (16, False, 1.0)
    lines: list[str] = []
    with PrefixCache.open(MODEL, settings, say=lines.append):
        pass
    assert f"warning: {', '.join(OTHERS)}: not used, these sections are KTransformers' own" in lines


def test_its_500_gb_stop_the_start(theirs: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"kvc2\.cpu_memory_size_GB of 500 GB is more than the .* of memory that is free.*make it smaller"
    ):
        PrefixCache.open(MODEL, str(theirs(500, tmp_path / "kvc")), say=None)


def test_a_path_of_somebody_else_stops_the_start(theirs: Any, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(ConfigError, match=r"kvc2\.disk_path .*/home/wjh/kvc cannot be used: .*give a directory"):
        PrefixCache.open(MODEL, str(theirs(0.01, tmp_path / "home" / "wjh" / "kvc")), say=None)


@pytest.mark.parametrize("content", ["modell: {path: x}", "model: x", "kvcache: {disk_path: x}"])
def test_what_is_not_theirs_either_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match="unknown key"):
        Settings.load(tmp_path / "config.yaml", environ={})


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("kvc2: {disk_path: 2001-99-99}", "month must be in 1..12; write it in quotes"),
        ("kvc2: {io_threads: !!int abc}", "write it in quotes"),
        ('kvc2: {io_threads: !!int ""}', "write it in quotes"),
        ("kvc2: {gpu_only: !!bool x}", "write it in quotes"),
        ("kvc2: {disk_path: !!timestamp x}", "write it in quotes"),
        ("kvc2: " + 3000 * "[" + 3000 * "]", "nests too deeply; it needs no more than sections with their keys"),
    ],
)
def test_values_that_yaml_itself_cannot_make(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match=rf"the config file .*config\.yaml .*{sentence}$"):
        Settings.load(tmp_path / "config.yaml", environ={})
    shown = kvstrata("config", "show", "--config", tmp_path / "config.yaml")
    assert (shown.status, shown.err.count("\n")) == (2, 1)


def test_a_path_that_cannot_be_one() -> None:
    with pytest.raises(ConfigError, match=r"the config file 'a\\x00b' cannot be read: embedded null byte; check --config"):
        Settings.load("a\0b", environ={})


def test_models_and_devices_that_cannot_be(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    for command in (("config", "show"), ("doctor",)):
        for device in ("tpu", "cuda:", "cuda:x", "cpu:0", ""):
            refused = kvstrata(*command, "--model", tmp_path, "--device", device)
            assert (refused.status, refused.err) == (2, f"kvstrata: --device {device!r} is not known: use cpu or cuda[:index]\n")
    monkeypatch.setitem(sys.modules, "torch", None)
    refused = kvstrata("config", "show", "--model", tmp_path, "--device", "cuda")
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert "device 'cuda' needs the package torch" in refused.err
    assert "device 'cuda' needs the package torch" in kvstrata("doctor", "--model", tmp_path, "--device", "cuda").out
    monkeypatch.undo()
    for content, kind in (("[]", "list"), ("null", "NoneType"), ("3", "int")):
        (tmp_path / "config.json").write_text(content)
        for command in (("config", "show"), ("doctor",)):
            refused = kvstrata(*command, "--model", tmp_path)
            assert (refused.status, refused.err.count("\n")) == (2, 1)
            assert f"its config.json holds {kind}, but must hold an object" in refused.err


def test_show(theirs: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("KVSTRATA_KVC2_IO_THREADS", "2")
    file = theirs(0.01, tmp_path / "kvc")
    shown = kvstrata("config", "show", "--config", file, "--json")
    assert shown.status == 0
    settings = shown.json["settings"]
    assert set(settings) == set(KEYS)
    assert settings["attn.page_size"] == {"value": 16, "origin": str(file)}
    assert settings["kvc2.io_threads"] == {"value": 2, "origin": "KVSTRATA_KVC2_IO_THREADS"}
    assert settings["max_batch_size"] == {"value": 8, "origin": "default"}
    assert tuple(shown.json["passed_over"]) == OTHERS
    text = kvstrata("config", "show", "--config", file)
    assert "attn.page_size" in text.out
    assert "these sections are KTransformers' own" in text.out


def test_show_for_a_model(theirs: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "torch_dtype": "float32"}))
    shown = kvstrata("config", "show", "--config", theirs(0.01, tmp_path / "kvc"), "--model", tmp_path)
    assert "2 layers, float32" in shown.out
    assert kvstrata("config", "show", "--model", tmp_path / "nowhere").status == 2
    assert kvstrata("config", "show", "--config", theirs(500, tmp_path / "kvc"), "--model", tmp_path).status == 2


def test_the_reference_page_is_the_printed_one() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text() == reference(), "run: kvstrata config reference > docs/configuration.md"
    assert kvstrata("config", "reference").out == reference()
