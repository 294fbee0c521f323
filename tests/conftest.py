"""Shared by all tests: one thread per process, and CUDA tests skipped where there is no GPU."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before torch is imported: results are compared bit for bit, which needs one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

# A core of another build, for tests that run tests (faults/unguarded.py): before anything imports the package's own.
if core := os.environ.get("KVSTRATA_TEST_CORE"):
    spec = importlib.util.spec_from_file_location("kvstrata._core", core)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["kvstrata._core"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["kvstrata._core"])

if TYPE_CHECKING:
    from kvstrata.cache import PrefixCache


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get("KVSTRATA_GUARDS"):  # they need a build of their own: make guards
        guards = [item for item in items if item.get_closest_marker("guards")]
        items[:] = [item for item in items if item not in guards]
        config.hook.pytest_deselected(items=guards)
    cuda = [item for item in items if item.get_closest_marker("cuda")]
    if cuda and not _has_gpu():
        for item in cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, made once in the user's cache directory; tests that use it are slow ones."""
    from kvstrata.models import smollm2_path

    return smollm2_path()


@pytest.fixture
def open_cache() -> "Iterator[Callable[..., PrefixCache]]":
    """open_cache(gpu, cpu, disk, ...): a small cache (see support.py), freed slab rows poisoned; proven and closed at the end."""
    from support import tiny_identity, tiny_layout

    from kvstrata.cache import Limits, PrefixCache

    caches = []

    def open_it(gpu: int = 8, cpu: int = 0, disk: Path | str = "", disk_bytes: int = 4 << 20, **options: Any) -> PrefixCache:
        layout = options.pop("layout", None) or tiny_layout()
        identity = options.pop("identity", None) or tiny_identity(layout)
        # What is to come comes, however busy the machine: only tests of deadlines set one.
        rest = {"load_deadline": 60.0} | {name: options.pop(name) for name in list(options) if name in Limits._fields}
        limits = Limits(gpu, cpu, str(disk), disk_bytes if disk else 0, **rest)
        caches.append(PrefixCache(layout, limits, identity=identity, poison=True, **options))
        return caches[-1]

    yield open_it
    for cache in caches:
        cache.check_integrity()
        assert cache.stats()["open_leases"] == 0, "a lease was not given back"
        cache.close()


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
