"""The loop: what comes out, who gets in when, and what happens to a request in trouble."""

import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import BYTES, Recorder, Spell, expected, tiny_model, words

from kvstrata.cache import PrefixCache
from kvstrata.engine import Engine, Request, Sampling, Sequence, scheduler
from kvstrata.engine.scheduler import ROOM_S
from kvstrata.lease import Lease


def steps(engine: Engine, count: int = 10_000) -> None:
    while count and (engine.scheduler.waiting or engine.scheduler.loading or engine.scheduler.running):
        engine.step()
        count -= 1


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek"])
def test_same_tokens_as_generate_cold_and_reused(make_engine: Callable[..., Engine], name: str) -> None:
    engine = make_engine(name)
    prompt = words(150)
    for reused in (0, 128):
        (sequence,) = engine.generate([prompt], max_new_tokens=20)
        assert (sequence.reason, sequence.error) == ("length", None)
        assert sequence.output == expected(engine, prompt, 20)
        stats = sequence.stats
        assert (stats.prompt_tokens, stats.computed_tokens, stats.output_tokens) == (150, 150 - reused, 20)
        assert stats.reused_tokens == {"gpu": reused, "cpu": 0, "disk": 0}
        assert stats.ttft_s is not None
        assert stats.ttft_cpu_s is not None


def test_prompts_of_every_length_around_pages_and_chunks(make_engine: Callable[..., Engine]) -> None:
    """A11: at least one token is computed, however much of the prompt is cached."""
    engine = make_engine()
    for length in (1, 15, 16, 17, 63, 64, 65, 128, 129):
        for _ in range(2):
            (sequence,) = engine.generate([words(length)], max_new_tokens=3)
            assert sequence.output == expected(engine, words(length), 3)
            assert sequence.stats.computed_tokens >= 1
        assert sum(sequence.stats.reused_tokens.values()) == (length - 1) // 64 * 64


def test_batch_of_mixed_requests(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(gpu_pages=120)
    prompts = [words(100 + 10 * i, seed=i % 3) for i in range(8)] + [words(5, seed=9)]
    for sequence, prompt in zip(engine.generate(prompts, max_new_tokens=12), prompts, strict=True):
        assert sequence.output == expected(engine, prompt, 12)


def test_a_prompt_is_what_it_was_when_it_was_submitted(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    prompt = np.array(words(100), np.int32)
    sequence = engine.submit(Request(prompt, Sampling(max_new_tokens=4)))
    prompt.fill(0)
    assert sequence.result().output == expected(engine, words(100), 4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_beside_others_logits_stay_within_tolerance(make_engine: Callable[..., Engine], name: str) -> None:
    engine = make_engine(name, gpu_pages=120)
    alone, beside = Recorder(), Recorder()
    engine.submit(Request(words(90), Sampling(max_new_tokens=20, processors=[alone]))).result()
    others = [engine.submit(Request(words(90 + i, seed=i), Sampling(max_new_tokens=30))) for i in range(4)]
    engine.submit(Request(words(90), Sampling(max_new_tokens=20, processors=[beside]))).result()
    assert all(not other.finished for other in others)
    steps(engine)
    for one, other in zip(alone.scores, beside.scores, strict=True):
        assert (one - other).abs().max() <= 1e-4


def test_prefill_chunks_lie_on_the_grid_and_take_turns_with_decoding(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(gpu_pages=120)
    seen: list[Any] = []
    forward = engine.forward
    engine.forward = lambda batch: (seen.append((batch.chunk, len(batch.sequences))), forward(batch))[1]  # type: ignore[method-assign]
    first = engine.submit(Request(words(10), Sampling(max_new_tokens=10)))
    engine.step()
    second = engine.submit(Request(words(150, seed=1), Sampling(max_new_tokens=2)))
    steps(engine)
    assert first.output == expected(engine, words(10), 10)
    assert second.output == expected(engine, words(150, seed=1), 2)
    assert seen[:7] == [
        (range(10), 1),
        (None, 1),
        (range(64), 1),
        (None, 1),
        (range(64, 128), 1),
        (None, 1),
        (range(128, 150), 1),
    ]
    assert seen[7] == (None, 2)


def test_requests_that_come_together_compute_a_new_prefix_once(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(gpu_pages=120)
    prompts = [words(200) + words(8, seed=i) for i in range(5)]
    sequences = engine.generate(prompts, max_new_tokens=4)
    assert [sequence.stats.computed_tokens for sequence in sequences] == [208] + [16] * 4
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.output == expected(engine, prompt, 4)


def test_generated_tokens_are_published(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    (first,) = engine.generate([words(100)], max_new_tokens=50)
    (second,) = engine.generate([words(100) + first.output], max_new_tokens=5)
    assert second.stats.reused_tokens["gpu"] == 128
    assert second.output == expected(engine, words(100) + first.output, 5)


def test_reuse_off_computes_everything_and_publishes_nothing(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(reuse=False)
    for _ in range(2):
        (sequence,) = engine.generate([words(150)], max_new_tokens=20)
        assert sequence.stats.computed_tokens == 150
        assert sequence.output == expected(engine, words(150), 20)
    assert engine.cache.stats()["known_pages"] == 0


def test_who_does_not_fit_waits_in_order(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(gpu_pages=12)  # 192 tokens
    order: list[int] = []
    prompts = [words(100, seed=i) for i in range(4)] + [words(10, seed=9)]
    sequences = []
    for number, prompt in enumerate(prompts):
        heard = Request(prompt, Sampling(max_new_tokens=8), on_token=lambda token, number=number: order.append(number))
        sequences.append(engine.submit(heard))
    engine.step()
    assert len(engine.scheduler.waiting) == 4  # the short one would fit, but does not overtake
    steps(engine)
    assert list(dict.fromkeys(order)) == [0, 1, 2, 3, 4]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.output == expected(engine, prompt, 8)


def test_nobody_overtakes_however_slow_the_thread_is(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """More than ROOM_S passes between any two looks at the clock."""
    engine = make_engine(gpu_pages=12)
    now = itertools.count(100.0, 2 * ROOM_S)
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: next(now)))
    sequences = [engine.submit(Request(words(tokens), Sampling(max_new_tokens=8))) for tokens in (100, 101, 10)]
    engine.step()
    assert engine.scheduler.waiting == sequences[1:]
    assert [sequence.result().reason for sequence in sequences] == ["length"] * 3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The scheduler's, which the test turns: its only item."""
    now = [100.0]
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether there was room, for every time that a lease was asked for."""
    answers, lease = [], PrefixCache.lease

    def noted(cache: PrefixCache, *tokens: Any, **options: Any) -> Any:
        found = lease(cache, *tokens, **options)
        answers.append(bool(found))
        return found

    monkeypatch.setattr(PrefixCache, "lease", noted)
    return answers


def test_a_full_pool_is_asked_again_now_and_then(make_engine: Callable[..., Engine], clock: list[float], asked: list[bool]) -> None:
    """Others may use the pool as well, and nobody tells the engine when they give room back."""
    engine = make_engine(gpu_pages=12)
    other = engine.cache.lease(words(100, seed=1), must=True)
    asked.clear()
    sequence = engine.submit(Request(words(100), Sampling(max_new_tokens=4)))
    for wait, times in ((0.0, 1), (0.9 * ROOM_S, 1), (0.2 * ROOM_S, 2), (0.9 * ROOM_S, 2), (0.2 * ROOM_S, 3)):
        clock[0] += wait
        for _ in range(5):
            assert not engine.step()
        assert asked == [False] * times
    other.release()
    assert not engine.step()
    clock[0] += ROOM_S
    assert sequence.result().reason == "length"
    assert asked == [False, False, False, True]


def test_room_that_the_engine_made_is_asked_for_at_once(
    make_engine: Callable[..., Engine], clock: list[float], asked: list[bool]
) -> None:
    """Also where no time passes: when pages are published, which the next one may share, and when a request ends."""
    engine = make_engine(gpu_pages=12)
    sequences = [engine.submit(Request(words(100, seed=seed), Sampling(max_new_tokens=4))) for seed in range(3)]
    steps(engine, 100)
    assert [sequence.reason for sequence in sequences] == ["length"] * 3
    assert asked.count(True) == 3
    assert asked.count(False) == 6  # behind each of the first two: at first, and when its two chunks were published


@pytest.mark.parametrize(
    ("prompt", "options", "sentence"),
    [
        (words(300), {}, "300 prompt tokens and 128 new ones need 27 pages and the pool holds 12"),
        (words(4000), {}, "4,000 prompt tokens and 128 new ones exceed the model's 4,096 positions"),
        ([], {}, "the prompt is empty"),
        ([3, 256], {}, "the prompt holds token 256, and the model knows 0 to 255"),
        ([1.7], {}, "token ids must be a flat sequence of integers, not float64 of shape (1,)"),
        (None, {}, "token ids must be a flat sequence of integers, not object of shape ()"),
        ([3], {"temperature": -1}, "temperature must be a number, 0 or above, not -1"),
        ([3], {"temperature": "hot"}, "temperature must be a number, 0 or above, not 'hot'"),
        ([3], {"top_p": 0}, "top_p must be a number above 0 and at most 1, not 0"),
        ([3], {"max_new_tokens": 0}, "max_new_tokens is 0, but must be a whole number from 1 to 2147483647"),
        ([3], {"top_k": 1.5}, "top_k is 1.5, but must be a whole number from 0 to 2147483647"),
        ([3], {"stop": [""]}, "stop strings must not be empty, not ['']"),
        ([3], {"stop": None}, "stop must be a string or a list of strings, not None"),
        ([3], {"processors": 5}, "processors must be a list of transformers' objects, not 5"),
        ([3], {"criteria": {3}}, "criteria must be a list of transformers' objects, not {3}"),
    ],
)
def test_impossible_requests_are_refused_with_a_sentence(
    make_engine: Callable[..., Engine], prompt: Any, options: dict[str, Any], sentence: str
) -> None:
    engine = make_engine(gpu_pages=12)
    good = engine.submit(Request(words(20), Sampling(max_new_tokens=4)))
    bad = engine.submit(Request(prompt, Sampling(**options)))
    assert list(bad) == []
    assert (bad.reason, bad.error) == ("refused", sentence)
    assert (bad.text, list(bad.pieces())) == ("", [])
    assert good.result().output == expected(engine, words(20), 4)


def test_cancel_in_every_state(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(gpu_pages=30)
    early = engine.submit(Request(words(100)))
    engine.step()
    early.cancel()
    (again,) = engine.generate([words(100)], max_new_tokens=3)
    assert early.reason == "cancelled"
    assert again.stats.reused_tokens["gpu"] == 64  # what the cancelled one had computed
    waiting_for_room = [engine.submit(Request(words(100, seed=i), Sampling(max_new_tokens=50))) for i in range(5)]
    engine.step()  # the first one has computed a chunk
    assert engine.scheduler.waiting
    waiting_for_room[4].cancel()
    waiting_for_room[0].cancel()
    assert waiting_for_room[0].result().reason == waiting_for_room[4].result().reason == "cancelled"
    while not waiting_for_room[1].output:
        engine.step()
    waiting_for_room[1].cancel()
    engine.step()
    assert waiting_for_room[1].reason == "cancelled"
    assert len(waiting_for_room[1].output) == 1
    for sequence in waiting_for_room[2:4]:
        assert sequence.result().reason == "length"
    assert engine.cache.stats()["open_leases"] == 0


class Explosive:
    """A logits processor that fails at its third token."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ArithmeticError("no third token")
        return scores


def test_errors_of_one_request_do_not_hurt_others(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(gpu_pages=80)

    def refuse(token: int) -> None:
        raise OSError("the client is gone")

    good = [engine.submit(Request(words(40, seed=i), Sampling(max_new_tokens=8))) for i in range(3)]
    sampling = engine.submit(Request(words(40, seed=5), Sampling(processors=[Explosive()])))
    impossible = engine.submit(Request(words(40, seed=7), Sampling(repetition_penalty="much")))  # type: ignore[arg-type]
    callback = engine.submit(Request(words(40, seed=6), on_token=refuse))
    steps(engine)
    assert (sampling.reason, sampling.error, len(sampling.output)) == ("error", "ArithmeticError: no third token", 2)
    assert impossible.reason == "refused"
    assert (callback.reason, callback.error) == ("error", "OSError: the client is gone")
    for seed, sequence in enumerate(good):
        assert sequence.output == expected(engine, words(40, seed=seed), 8)


def test_a_failing_forward_ends_only_the_request_that_caused_it(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(gpu_pages=80)
    decode = engine.runner.decode

    def fragile(sequences: list[Sequence]) -> torch.Tensor:
        if any(sequence.number == 1 and len(sequence.output) == 3 for sequence in sequences):
            raise RuntimeError("CUDA error: something")
        return decode(sequences)

    engine.runner.decode = fragile  # type: ignore[method-assign, assignment]
    sequences = engine.generate([words(40, seed=i) for i in range(3)], max_new_tokens=8)
    assert (sequences[1].reason, sequences[1].error) == ("error", "RuntimeError: CUDA error: something")
    for seed in (0, 2):
        assert sequences[seed].output == expected(engine, words(40, seed=seed), 8)


def test_iterating_streams_tokens_and_text(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    sequence = engine.submit(Request("some text", Sampling(max_new_tokens=6)))
    seen = []
    for token in sequence:
        seen.append(token)
        assert len(sequence.output) == len(seen)  # each as soon as it is there
    assert seen == sequence.output
    spelling = engine.submit(Request("some text", Sampling(max_new_tokens=5, processors=[Spell("hello", 9)])))
    assert list(spelling.pieces()) == list("hello")
    assert spelling.text == "hello"


def test_a_thread_in_run_serves_others(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(gpu_pages=300)
    stop = threading.Event()
    server = threading.Thread(target=engine.run, args=(stop,), daemon=True)
    server.start()
    prompts = [words(50, seed=i) for i in range(4)]
    outputs: dict[int, list[int]] = {}

    def client(number: int) -> None:
        outputs[number] = list(engine.submit(Request(prompts[number], Sampling(max_new_tokens=8))))

    clients = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(60)
    unfinished = engine.submit(Request(words(60), Sampling(max_new_tokens=4000)))
    next(iter(unfinished))
    stop.set()
    server.join(60)
    assert unfinished.reason == "cancelled"
    for number, prompt in enumerate(prompts):
        assert outputs[number] == expected(engine, prompt, 8)


def test_tenants_do_not_share(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(gpu_pages=80)
    for tenant, reused in (("a", 0), ("b", 0), ("a", 64)):
        (sequence,) = engine.generate([words(100)], tenant=tenant, max_new_tokens=2)
        assert sequence.stats.reused_tokens["gpu"] == reused


def test_a_cache_of_another_dtype_is_refused(make_cache: Callable[..., PrefixCache]) -> None:
    cache = make_cache(tiny_model())
    with pytest.raises(ValueError, match=r"model is torch\.bfloat16 on cpu and the cache torch\.float32 on cpu"):
        Engine(tiny_model(dtype=torch.bfloat16), BYTES, cache)


def test_pool_stays_where_it_is(make_engine: Callable[..., Engine]) -> None:
    """S1: no address of the pool changes while serving."""
    engine = make_engine(gpu_pages=60)
    addresses = [plane.data_ptr() for layer in engine.cache.pool.layers for plane in layer.planes.values()]
    engine.generate([words(100, seed=i) for i in range(10)], max_new_tokens=5)
    assert addresses == [plane.data_ptr() for layer in engine.cache.pool.layers for plane in layer.planes.values()]


def test_every_pass_is_fenced(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are published behind the pass that wrote them, and rows are given back behind the last pass that used them."""
    engine = make_engine()
    marked: list[int] = []  # by each pass
    given: list[tuple[str, int, int]] = []
    mark = engine.cache.pool.mark_batch
    publish, release = Lease.publish, Lease.release
    monkeypatch.setattr(engine.cache.pool, "mark_batch", lambda: marked.append(mark()) or marked[-1])

    def published(lease: Lease, tokens: int, ready: int | None = None) -> int:
        given.append(("publish", -1 if ready is None else ready, marked[-1]))
        return publish(lease, tokens, ready)

    def released(lease: Lease, fence: int | None = None) -> None:
        given.append(("release", -1 if fence is None else fence, marked[-1]))
        release(lease, fence)

    monkeypatch.setattr(Lease, "publish", published)
    monkeypatch.setattr(Lease, "release", released)
    engine.generate([words(150), words(40, seed=1)], max_new_tokens=20)
    assert {what for what, _, _ in given} == {"publish", "release"}
    assert len(marked) > 20
    for what, fence, latest in given:
        assert fence == latest, f"{what} behind pass {fence} of {latest}"


def test_what_is_finished_is_forgotten(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    for number in range(20):
        sequence = engine.submit(Request(words(30, seed=number), Sampling(max_new_tokens=3)))
        alive.add(sequence)
        if number % 3 == 0:
            sequence.cancel()
        sequence.result()
    del sequence
    gc.collect()
    assert len(alive) == 0
    assert not [one for one in gc.get_objects() if type(one) is Lease]
