"""Tests of the vLLM connector. They need vLLM, which lives in an environment of its own: `make test-vllm`."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import pytest

if TYPE_CHECKING:
    from vllm_sim import Sim

found = importlib.util.find_spec("vllm")
collect_ignore_glob = [] if found and found.origin else ["*"]  # without one it is this very folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama of random weights, for engines that are configured and never run."""
    from vllm_sim import write_model

    return write_model(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture
def make_sim(tiny_model: Path) -> Iterator[Callable[..., "Sim"]]:
    """make_sim(...): vLLM's scheduler with the connector, and workers without a model; proven and closed at the end."""
    from vllm_sim import Sim

    made = []

    def make(**options: Any) -> "Sim":
        made.append(Sim(options.pop("model", tiny_model), **options))
        return made[-1]

    yield make
    for sim in made:
        sim.close()
