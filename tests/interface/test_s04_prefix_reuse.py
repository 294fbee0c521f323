"""S4: a prefix that was computed by any request is not computed again: equal output, and each request says what it was spared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import BYTES, tiny_model, words
from every_tier import push_out

from kvstrata.cache import PrefixCache
from kvstrata.engine import Engine, Request, Sampling, Sequence

CHUNK = 64
Make = Callable[..., PrefixCache]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Counted:
    """An engine, and how many tokens its model really computed."""

    def __init__(self, model: Any, cache: PrefixCache, **options: Any) -> None:
        self.engine = Engine(model, BYTES, cache, **options)
        self.computed = 0
        model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, module: Any, given: Any, output: torch.Tensor) -> None:
        self.computed += given[0].numel()

    def serve(self, prompt: list[int], new: int = 5) -> tuple[Sequence, int]:
        """The finished request, and the tokens computed for it: its prompt's, and each new one's but the last."""
        before = self.computed
        sequence = self.engine.submit(Request(prompt, Sampling(max_new_tokens=new, ignore_eos=True))).result()
        assert sequence.reason == "length", sequence.error
        return sequence, self.computed - before - (new - 1)


def reused(sequence: Sequence) -> int:
    return sum(sequence.stats.reused_tokens.values())


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek"])
def test_a_cached_prefix_is_never_computed_again(make_cache: Make, tmp_path: Path, name: str) -> None:
    """Independent requests with a common beginning, in one process and after a restart, from every tier."""
    system = words(3 * CHUNK, 1)
    prompts = [system + words(20 + 7 * number, 10 + number) for number in range(4)]
    model = tiny_model(name)
    disk = {"cpu_pages": 60, "disk_path": str(tmp_path / "disk"), "disk_bytes": 1 << 30}
    cache = make_cache(model, chunk=CHUNK, gpu_pages=24, **disk)
    outputs = [Counted(model, cache, reuse=False).serve(prompt)[0].output for prompt in prompts]
    served = Counted(model, cache)
    for number, prompt in enumerate(prompts):
        if number == 2:
            cache.flush(30)
            push_out(cache, len(system), 2)
        sequence, computed = served.serve(prompt)
        assert sequence.output == outputs[number]
        saved = 3 * CHUNK if number else 0
        assert (reused(sequence), sequence.stats.computed_tokens) == (saved, len(prompt) - saved)
        assert computed == sequence.stats.computed_tokens  # the model did no more than it says
        assert sequence.stats.reused_tokens["cpu"] == (saved if number == 2 else 0)
    cache.close()
    again = Counted(model, make_cache(model, chunk=CHUNK, gpu_pages=24, **disk))
    for prompt, output in zip(prompts, outputs, strict=True):
        sequence, computed = again.serve(prompt)
        assert sequence.output == output
        assert (reused(sequence), computed) == (3 * CHUNK, len(prompt) - 3 * CHUNK)


def test_what_was_generated_is_a_prefix_too(make_cache: Make) -> None:
    """The next turn of a conversation computes what is new, up to the grid."""
    model = tiny_model("llama")
    cache = make_cache(model, chunk=CHUNK)
    served = Counted(model, cache)
    first, _ = served.serve(words(100), new=CHUNK)
    turn = words(100) + first.output + words(30, 5)
    second, computed = served.serve(turn)
    assert reused(second) == 2 * CHUNK  # 164 tokens, of which one is never written: 163
    assert computed == len(turn) - 2 * CHUNK
    assert second.output == Counted(model, cache, reuse=False).serve(turn)[0].output


def test_of_two_prefixes_the_longer_one_is_used_and_no_other(make_cache: Make) -> None:
    model = tiny_model("llama")
    served = Counted(model, make_cache(model, chunk=CHUNK, page_size=16))
    base = words(4 * CHUNK)
    served.serve(base[: 2 * CHUNK + 1])
    served.serve(base[: 3 * CHUNK + 1])
    assert reused(served.serve([*base, 1])[0]) == 3 * CHUNK
    other = list(base)
    other[CHUNK] ^= 1
    assert reused(served.serve(other)[0]) == CHUNK
    assert reused(served.serve([base[0] ^ 1, *base[1:]])[0]) == 0
