"""Settings for tests: loaded without this machine's environment, resolved on machines that are made up."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstrata import capacity, machine
from kvstrata.config import ConfigError, Settings
from kvstrata.layout import PageLayout
from kvstrata.machine import Folder, Memory
from kvstrata.units import GB

MODEL = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 1024}
LAYOUT = PageLayout.from_config(MODEL, page_size=256, dtype="bfloat16")  # 8 KiB per token, 2 MiB per page
MEMORY = Memory(total=64 * GB, available=40 * GB)


def load(source: Any = None, overrides: Any = None, **environ: str) -> Settings:
    return Settings.load(source, overrides, environ=environ)


def refusal(*arguments: Any, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*arguments, **environ)
    return str(caught.value)


class Machine(NamedTuple):
    free: int = 300 * GB
    used: int = 0
    total: int = 1000 * GB

    def probe_folder(self, path: Path, *, group: bool = False) -> Folder:
        return Folder(path, self.total, self.free, self.used)


def resolve(settings: dict[str, Any], disk: Machine | None = None, **arguments: Any) -> capacity.Capacity:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "probe_folder", (disk or Machine()).probe_folder)
        return capacity.resolve(load(settings), LAYOUT, **({"memory": MEMORY} | arguments))


def unresolved(settings: dict[str, Any], disk: Machine | None = None, **arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(settings, disk, **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)
