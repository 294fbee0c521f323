"""docs/ktransformers.md: its commands and its Python run as they are written, on the CPU where it says cuda:0."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from pages import prompt
from tool_kit import kvstrata

from kvstrata.config import KEYS

PAGE = (Path(__file__).parents[2] / "docs" / "ktransformers.md").read_text()
CONFIG = """
server: {port: 10002}
async_server: {max_batch_size: 4}
attn: {page_size: 16, chunk_size: 256}
kvc2: {gpu_only: false, utilization_percentage: 1.0, cpu_memory_size_GB: 0.01, disk_path: kvc}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a config.yaml, and a model of four layers at path/to/model."""
    monkeypatch.chdir(tmp_path)
    save_config(512, 64)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def save_config(rank: int, rope: int) -> None:
    config = transformers.DeepseekV3Config(num_hidden_layers=4, kv_lora_rank=rank, qk_rope_head_dim=rope)
    config.save_pretrained("path/to/model")


def code() -> list[str]:
    """The page's indented blocks."""
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", PAGE, re.MULTILINE)
    return [re.sub("^    ", "", block, flags=re.MULTILINE).strip() for block in blocks]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_the_commands(folder: Path) -> None:
    save_config(16, 16)  # its sessions fit on any disk: how much is free here is not what is tested
    lines = [block.removeprefix("$ ") for block in code() if block.startswith("$ ")]
    lines += re.findall(r"`(kvstrata [^`]+)`", PAGE)
    assert [line.split()[1] for line in lines] == ["config", "doctor"]
    for line in lines:
        ended = kvstrata(*line.split()[1:])
        assert ended.status in (0, 1), ended.out
        assert ended.err == ""
    assert not (folder / "kvc").exists()


def test_the_keys() -> None:
    told = re.findall(r"^\| `(\w+\.\w+)` \|", PAGE, re.MULTILINE)
    assert len(told) == 6
    assert set(told) <= set(KEYS)


def test_the_python(folder: Path) -> None:
    first, leases, raw = (block for block in code() if not block.startswith("$ "))
    tokens = prompt(3, page_size=256)
    known: dict[str, Any] = {
        "mini_batch": SimpleNamespace(
            prefill_batch=1, p_q_len=ints(2), p_position_ids=ints(255, 256), p_block_tables=ints(3, 4)[None], decode_batch=0
        ),
        "combined_tensor": torch.randn(1, 2, 1, 576, dtype=torch.bfloat16),
        "tokens": tokens,
        "k": [torch.randn(len(tokens), 1, 576, dtype=torch.bfloat16) for _ in range(4)],
        "v": None,
    }
    exec(first.replace('"cuda:0"', '"cpu"'), known)
    try:
        exec(leases, known)
        assert known["hit"] == 0
        assert known["page_idx"].shape == (1, len(tokens))
        exec(raw, known)
        assert known["held"] == known["found"] == len(tokens)
    finally:
        known["cache"].close()
