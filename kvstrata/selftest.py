"""A few pages through every tier and back, compared byte by byte, with small tiers of its own beside whoever uses the directory."""

import hashlib
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstrata.cache import Limits, PrefixCache
from kvstrata.fingerprint import Fingerprint
from kvstrata.identity import Identity
from kvstrata.layout import PageLayout, PlaneSpec

__all__ = ["selftest"]

log = logging.getLogger("kvstrata")
PAGES, PAGE_SIZE = 4, 16
PATIENCE_S = 5.0


def selftest(folder: Path | None, device: str = "cpu") -> dict[str, str]:
    """By tier ("gpu", "cpu", "disk", "restart"): "" where the pages came back right from there, else what happened; told in the
    log, too. Needs torch. `folder`: where a directory of its own is made for the disk tier, and removed; None: no disk tier."""
    results = _trials(folder, device)
    for tier, trouble in results.items():
        log.log(logging.WARNING if trouble else logging.INFO, "self-test: %s: %s", tier, trouble or "pages came back as they were")
    return results


def _trials(folder: Path | None, device: str) -> dict[str, str]:
    if folder is None:
        return _Trial("", device).run()
    own = Path(tempfile.mkdtemp(prefix="selftest-", dir=folder))
    try:
        first = _Trial(str(own), device).run()
        return {**first, "restart": _Trial(str(own), device).found_on_disk()}
    finally:
        shutil.rmtree(own, ignore_errors=True)


class _Trial:
    """One cache, a device pool of two prompts, a CPU tier of four."""

    def __init__(self, root: str, device: str) -> None:
        specs = [PlaneSpec(layer, name, "float32", (2, 8)) for layer in range(2) for name in ("k", "v")]
        self.layout = PageLayout.from_planes(specs, page_size=PAGE_SIZE, dtype="float32", tag="kvstrata-selftest")
        identity = Identity.of({"model_type": "selftest"}, self.layout, Fingerprint("full", bytes(32)))
        limits = Limits(2 * PAGES, 4 * PAGES, root, (16 << 20) if root else 0)
        self.cache = PrefixCache(self.layout, limits, identity=identity, device=device)

    def run(self) -> dict[str, str]:
        tokens = self._prompt(0)
        try:
            self._serve(tokens)
            results = {"gpu": self._check(tokens, "gpu")}
            self._push(2)
            results["cpu"] = self._check(tokens, "cpu")
            if self.cache.limits.disk_path:
                self._push(8)
                results["disk"] = self._check(tokens, "disk")
            return results
        finally:
            self.cache.close(PATIENCE_S)

    def found_on_disk(self) -> str:
        try:
            return self._check(self._prompt(0), "disk")
        finally:
            self.cache.close(PATIENCE_S)

    def _prompt(self, number: int) -> npt.NDArray[np.int32]:
        return np.random.default_rng(number).integers(0, 30000, PAGES * PAGE_SIZE, np.int32)

    def _page(self, tokens: npt.NDArray[np.int32], page: int) -> npt.NDArray[np.uint8]:
        name = hashlib.sha256(tokens[: (page + 1) * PAGE_SIZE].tobytes()).digest()
        return np.frombuffer(hashlib.shake_128(name).digest(self.layout.row_bytes), np.uint8)

    def _serve(self, tokens: npt.NDArray[np.int32]) -> tuple[dict[str, int], str]:
        """What a request finds by tier, and what is wrong with it; then it computes the rest."""
        import torch

        pool = self.cache.pool
        with self.cache.lease(tokens, must=True) as lease:
            hit = lease.wait(PATIENCE_S) // PAGE_SIZE
            bad = [
                page
                for page in range(hit)
                if not np.array_equal(
                    pool.data[int(lease.rows[page]), : self.layout.row_bytes].cpu().numpy(), self._page(tokens, page)
                )
            ]
            found: dict[str, int] = {tier: count // PAGE_SIZE for tier, count in lease.sources.items()}
            for page in range(hit, PAGES):
                pool.data[int(lease.rows[page]), : self.layout.row_bytes].copy_(torch.from_numpy(self._page(tokens, page).copy()))
            lease.publish(len(tokens), ready=pool.mark_batch())
        return found, f"{len(bad)} pages came back changed" if bad else ""

    def _push(self, prompts: int) -> None:
        for number in range(1, prompts + 1):
            self._serve(self._prompt(number))
            self.cache.flush(PATIENCE_S)

    def _check(self, tokens: npt.NDArray[np.int32], tier: str) -> str:
        if not self.cache.flush(PATIENCE_S):
            return f"pages were still moving after {PATIENCE_S:g} s"
        found, wrong = self._serve(tokens)
        if wrong:
            return wrong
        missing: Any = found[tier] != PAGES - 1
        return f"found {found} of {PAGES - 1} pages" if missing else ""
