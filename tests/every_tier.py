"""One prompt through the engine from every tier, each time compared bit for bit with a run that reuses nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine_kit import Recorder, words

from kvstrata.cache import PrefixCache
from kvstrata.engine import Engine, Request, Sampling

CHUNK = 256
PROMPT = 2 * CHUNK + 17


def logits(engine: Engine, prompt: list[int], new: int = 6) -> tuple[torch.Tensor, dict[str, int]]:
    """Float32 logits of every output token, and what was reused."""
    recorder = Recorder()
    sequence = engine.submit(Request(prompt, Sampling(max_new_tokens=new, ignore_eos=True, processors=[recorder]))).result()
    assert sequence.reason == "length", sequence.error
    return torch.cat(recorder.scores), sequence.stats.reused_tokens


def push_out(cache: PrefixCache, tokens: int, rounds: int) -> None:
    """Other requests, which need every page of the device pool `rounds` times; what they compute does not matter."""
    pages = (cache.pool.pages - 1) * rounds
    for seed in range(100, 100 + -(-pages * cache.page_size // tokens)):
        with cache.lease(words(tokens, seed), must=True) as lease:
            lease.wait()
            lease.publish(tokens)
        cache.flush(30)


def check_every_tier(
    model: Any, tokenizer: Any, make_cache: Callable[..., PrefixCache], page_size: int, prompt: list[int], folder: Path
) -> None:
    """The same prompt from gpu, cpu, disk, and disk after a restart, each compared with a run that reuses nothing."""
    long, pages = len(prompt) + 6, -(-(len(prompt) + 6) // page_size)
    options = {"page_size": page_size, "chunk": CHUNK, "gpu_pages": pages + 2, "cpu_pages": 3 * pages}
    disk = {"disk_path": str(folder), "disk_bytes": 2 << 30}
    shared = (len(prompt) - 1) // CHUNK * CHUNK
    cache = make_cache(model, **options, **disk)
    reference, reused = logits(Engine(model, tokenizer, cache, reuse=False), prompt)
    engine = Engine(model, tokenizer, cache)
    got = {"cold": logits(engine, prompt), "gpu": logits(engine, prompt)}
    cache.flush(30)
    push_out(cache, long, 1)
    got["cpu"] = logits(engine, prompt)
    push_out(cache, long, 6)
    got["disk"] = logits(engine, prompt)
    cache.close()
    cache = make_cache(model, **options, **disk)
    got["restart"] = logits(Engine(model, tokenizer, cache), prompt)
    for case, (scores, reused) in got.items():
        tier = "disk" if case == "restart" else case
        assert reused == {name: shared if name == tier else 0 for name in ("gpu", "cpu", "disk")}, case
        assert torch.equal(scores, reference), case
