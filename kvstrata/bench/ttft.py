"""`kvstrata bench ttft`: CPU seconds from a request to its first token, beside a bare forward pass over KV already in place.

A real model in the embedded engine; all of the prompt but its last few tokens is cached, in the device pool, in CPU memory, or,
after the cache was opened anew, on disk. Limit: transformers' own forward of those last tokens, its cache filled beforehand.
`copy_ms`: CPU time of one memcpy of the cached bytes. `restart_wall`: what the wall time of a request after a restart has beyond
that of one from the pool, against reading as many bytes with raw requests.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from kvstrata.bench.disk import PAGE_BYTES, RawFile
from kvstrata.bench.held import FLUSH_S, publish, random_tokens
from kvstrata.bench.report import Row, WrongData, compare
from kvstrata.cache import PrefixCache
from kvstrata.engine import Engine, Request, Sampling
from kvstrata.layout import PageLayout
from kvstrata.models import load_model

__all__ = ["measure"]

SUFFIX = 7  # tokens behind the cached ones
TIERS = ("gpu", "cpu", "disk")
QUIET_S = 60.0
UNRELATED = 32  # tokens of a request that is made first after a restart


def measure(
    model_path: str, dtype: str, tokens: int, page_size: int, rounds: int, folder: str | None, say: Callable[[str], None]
) -> Iterator[Row]:
    """Rows for `tokens` cached tokens, a multiple of the page size."""
    torch.set_num_threads(1)
    say(f"loading {Path(model_path).name}")
    model, tokenizer = load_model(model_path, dtype, "cpu")
    layout = PageLayout.from_config(model.config, page_size=page_size, dtype=dtype)
    size = tokens // page_size * layout.row_bytes
    prompt = random_tokens(tokens + SUFFIX, 1) % model.config.vocab_size
    bare = BareForward(load_model(model_path, dtype, "cpu")[0], prompt, tokens)  # an engine's model reads pages
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-", dir=folder) as root:
        raw = RawFile(Path(root) / "raw", max(4, size // PAGE_BYTES))
        stage = Stage(model, tokenizer, layout, f"{root}/cache", prompt, tokens)
        try:
            say(f"computing {tokens:,} tokens, {size >> 20} MiB of KV states")
            stage.prepare()
            yield from figures(stage, bare, raw, size, rounds)
        finally:
            stage.close()
            raw.close()


def figures(stage: "Stage", bare: "BareForward", raw: RawFile, size: int, rounds: int) -> Iterator[Row]:
    here, there = np.ones(size, np.uint8), np.ones(size, np.uint8)
    cpu: dict[str, list[float]] = {tier: [] for tier in TIERS}
    wall: dict[str, list[float]] = {tier: [] for tier in TIERS}
    limit, copies, reading = [], [], []
    for _ in range(rounds):
        limit.append(bare.cpu_ms())
        for tier in TIERS:
            ttft_cpu, ttft = stage.request(tier)
            cpu[tier].append(ttft_cpu * 1e3)
            wall[tier].append(ttft * 1e3)
        started = time.process_time()
        np.copyto(there, here)
        copies.append((time.process_time() - started) * 1e3)
        reading.append(raw.read() / (raw.pages * PAGE_BYTES) * size * 1e3)
    parameters: dict[str, Any] = {"tokens": stage.tokens, "page_size": stage.layout.page_size, "mib": size >> 20}
    parameters["copy_ms"] = float(np.median(copies))
    for tier, case in zip(TIERS, ("ttft_gpu", "ttft_cpu", "ttft_restart"), strict=True):
        yield compare(case, "ms", cpu[tier], limit, wall_ms=float(np.median(wall[tier])), **parameters)
    beyond = [restart - gpu for restart, gpu in zip(wall["disk"], wall["gpu"], strict=True)]
    yield compare("restart_wall", "ms", beyond, reading, **parameters)


class BareForward:
    """transformers alone: the last tokens of the prompt over a cache that holds the others."""

    def __init__(self, model: Any, prompt: np.ndarray, tokens: int) -> None:
        self._model, self._tokens = model, tokens
        self._past = transformers.DynamicCache(config=model.config)
        self._rest = torch.from_numpy(prompt[None, tokens:].astype(np.int64))
        with torch.inference_mode():
            model(torch.from_numpy(prompt[None, :tokens].astype(np.int64)), past_key_values=self._past, logits_to_keep=1)
            self.token = int(self._forward().argmax())

    def _forward(self) -> torch.Tensor:
        logits: torch.Tensor = self._model(self._rest, past_key_values=self._past, logits_to_keep=1).logits[0, -1]
        self._past.crop(self._tokens - self._past.get_seq_length())  # what this call added
        return logits

    def cpu_ms(self) -> float:
        with torch.inference_mode():
            started = time.process_time()
            token = int(self._forward().argmax())
            took = time.process_time() - started
        if token != self.token:
            raise WrongData("a bare forward pass gave another token than before")
        return took * 1e3


class Stage:
    """Model, cache and engine, and the prompt in the tier where it is wanted."""

    def __init__(self, model: Any, tokenizer: Any, layout: PageLayout, root: str, prompt: np.ndarray, tokens: int) -> None:
        self.layout, self.tokens = layout, tokens
        self._model, self._tokenizer, self._prompt = model, tokenizer, prompt.tolist()
        self._pages = tokens // layout.page_size
        pool = self._pages + 2
        self._settings = {
            "attn": {"page_size": layout.page_size, "chunk_size": layout.page_size},
            "kvc2": {
                "gpu_memory_size_GB": f"{(pool + 1) * layout.row_stride}B",
                "cpu_memory_size_GB": f"{4 * pool * layout.row_stride}B",
                "disk_size_GB": f"{40 * pool * layout.slot_bytes}B",
                "disk_path": root,
            },
        }
        self._others = 0
        self._answer: list[int] = []
        self._open()

    def _open(self) -> None:
        self._cache = PrefixCache.open(self._model, self._settings, say=None)
        self._engine = Engine(self._model, self._tokenizer, self._cache, max_batch_size=1)

    def _ask(self, prompt: list[int]) -> Any:
        sampling = Sampling(max_new_tokens=1, ignore_eos=True)
        sequence = self._engine.submit(Request(prompt, sampling)).result()
        if sequence.error:
            raise WrongData(sequence.error)
        return sequence

    def prepare(self) -> None:
        self._answer = self._ask(self._prompt).output
        self._cache.flush(FLUSH_S)

    def request(self, tier: str) -> tuple[float, float]:
        """CPU seconds and seconds to the first token, its prefix found in this tier."""
        if tier == "cpu":
            self._others += 1
            publish(self._cache, random_tokens((self._cache.pool.pages - 1) * self.layout.page_size, 1000 + self._others))
            self._cache.flush(FLUSH_S)
        elif tier == "disk":
            self._cache.close()
            self._open()
            self._ask(self._prompt[:UNRELATED][::-1])  # tokens that the model knows
            quiet()
        sequence = self._ask(self._prompt)
        found = {name: self.tokens if name == tier else 0 for name in TIERS}
        if sequence.stats.reused_tokens != found:
            raise WrongData(f"reused {sequence.stats.reused_tokens}, not {found}")
        if sequence.output != self._answer:
            raise WrongData(f"from {tier} the model answered {sequence.output}, not {self._answer}")
        self._cache.flush(FLUSH_S)
        return sequence.stats.ttft_cpu_s, sequence.stats.ttft_s

    def close(self) -> None:
        self._engine.close()
        self._cache.close()


def quiet() -> None:
    """Until nothing of this process computes in the background any more: fresh memory is being filled. Raises WrongData."""
    spent, end = time.process_time(), time.monotonic() + QUIET_S
    while time.monotonic() < end:
        time.sleep(0.1)
        before, spent = spent, time.process_time()
        if spent - before < 0.01:
            return
    raise WrongData(f"something goes on computing in this process for more than {QUIET_S:g} s")
