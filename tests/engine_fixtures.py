"""Fixtures of the tests that run models: small caches and engines. A conftest.py imports them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_kit import BYTES, tiny_model

from kvstrata.cache import Limits, PrefixCache
from kvstrata.engine import Engine
from kvstrata.identity import Fingerprint, Identity
from kvstrata.layout import PageLayout


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Equality bit for bit is promised for one thread."""
    torch.set_num_threads(1)


@pytest.fixture
def make_cache() -> Iterator[Callable[..., PrefixCache]]:
    """make_cache(model, ...): a cache for the model, its freed rows poisoned; closed and checked at the end of the test."""
    caches = []

    def make(
        model: Any, *, page_size: int = 16, chunk: int = 64, gpu_pages: int = 40, device: Any = "cpu", **limits: Any
    ) -> PrefixCache:
        layout = PageLayout.from_config(model.config, page_size=page_size, dtype=model.dtype)
        identity = Identity.of(model.config, layout, Fingerprint("full", bytes(32)))
        caches.append(PrefixCache(layout, Limits(gpu_pages, **limits), identity=identity, chunk=chunk, device=device, poison=True))
        return caches[-1]

    yield make
    for cache in caches:
        cache.check_integrity()
        assert cache.stats()["open_leases"] == 0
        cache.close()


@pytest.fixture
def make_engine(make_cache: Callable[..., PrefixCache]) -> Callable[..., Engine]:
    def make(name: str = "llama", **options: Any) -> Engine:
        model = tiny_model(name)
        engine = {key: options.pop(key) for key in ("reuse", "max_batch_size") if key in options}
        return Engine(model, BYTES, make_cache(model, **options), **engine)

    return make
