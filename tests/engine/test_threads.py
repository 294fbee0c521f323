"""An engine that several threads use, and one that is interrupted anywhere."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from engine_kit import Recorder, expected, words

from kvstrata.engine import Engine, Request, Sampling


def test_a_thread_per_request(make_engine: Callable[..., Engine]) -> None:
    """Handlers of a web server that know nothing of each other."""
    engine = make_engine(gpu_pages=60)
    wanted = [expected(engine, words(50, seed=seed), 16) for seed in range(12)]
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(engine.generate, [words(50, seed=seed)], max_new_tokens=16) for seed in range(12)]
        outputs = [future.result(60)[0].output for future in futures]
    assert outputs == wanted


def ask(engine: Engine, number: int, prompt: list[int], ended: list[tuple[int, Any]]) -> None:
    for _ in range(3):
        ended.append((number, engine.submit(Request(prompt, Sampling(max_new_tokens=24))).result()))


def test_clients_that_outlive_the_serving_thread(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(gpu_pages=60)
    prompts = [words(50, seed=seed) for seed in range(4)]
    wanted = [expected(engine, prompt, 24) for prompt in prompts]
    for _ in range(3):
        stop = threading.Event()
        server = threading.Thread(target=engine.run, args=(stop,))
        server.start()
        ended: list[tuple[int, Any]] = []
        clients = [threading.Thread(target=ask, args=(engine, number, prompts[number], ended)) for number in range(4)]
        for thread in clients:
            thread.start()
        while not ended:
            time.sleep(0.001)
        stop.set()
        for thread in [server, *clients]:
            thread.join(60)
            assert not thread.is_alive()
        assert len(ended) == 12
        for number, sequence in ended:
            if sequence.reason == "length":
                assert sequence.output == wanted[number]
            else:
                assert sequence.reason == "cancelled"
                assert sequence.output == wanted[number][: len(sequence.output)]


@pytest.mark.parametrize("place", ["on_token", "processor", "criterion"])
def test_what_a_step_calls_makes_no_step(make_engine: Callable[..., Engine], place: str) -> None:
    """It would compute tokens that the outer step has yet to choose, and publish the pages they make wrong."""
    engine = make_engine(gpu_pages=60)
    prompts = [words(40, seed=seed) for seed in range(3)]
    wanted = [expected(engine, prompt, 24) for prompt in prompts]
    inner: list[Any] = []

    def asks(*values: Any) -> Any:
        if len(asking.output) == 4:
            inner.append(engine.submit(Request(prompts[2], Sampling(max_new_tokens=24))))
            inner[0].result()
        return values[1] if place == "processor" else torch.zeros(1, dtype=torch.bool)

    lists = {"processor": {"processors": [asks]}, "criterion": {"criteria": [asks]}}.get(place, {})
    asking = engine.submit(
        Request(prompts[0], Sampling(max_new_tokens=24, **lists), on_token=asks if place == "on_token" else None)
    )
    other = engine.submit(Request(prompts[1], Sampling(max_new_tokens=24)))
    assert other.result().output == wanted[1]
    assert asking.result().reason == "error"
    assert str(asking.error).startswith("RuntimeError: on_token must not drive the engine")
    assert inner[0].result().output == wanted[2]
    assert other.output == engine.generate([prompts[1]], max_new_tokens=24)[0].output  # on what was published
    for drive in (engine.step, engine.advance):
        drive()  # outside again


def test_a_step_within_run_is_refused_too(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(gpu_pages=60)
    stop = threading.Event()
    server = threading.Thread(target=engine.run, args=(stop,))
    server.start()
    asking = engine.submit(Request(words(40), Sampling(max_new_tokens=4), on_token=lambda _: engine.run(stop)))
    assert str(asking.result().error).startswith("RuntimeError: on_token must not drive the engine")
    assert engine.generate([words(40)], max_new_tokens=4)[0].reason == "length"
    stop.set()
    server.join(60)
    assert not server.is_alive()


class InterruptedLock:
    """A lock whose owner is interrupted once: as soon as he has it, or just before he gives it back."""

    def __init__(self, moment: str) -> None:
        self.lock, self.moment = threading.RLock(), moment

    def acquire(self, blocking: bool = True) -> bool:
        assert self.lock.acquire(blocking)
        self.interrupt("taken")
        return True

    def release(self) -> None:
        self.interrupt("given back")
        self.lock.release()

    def interrupt(self, moment: str) -> None:
        if moment == self.moment:
            self.moment = ""
            raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lock, name)


@pytest.mark.parametrize("moment", ["taken", "given back"])
def test_an_interrupt_leaves_the_turn_to_others(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    engine = make_engine()
    sequence = engine.submit(Request(words(40), Sampling(max_new_tokens=4)))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_stepping", InterruptedLock(moment))
        with pytest.raises(KeyboardInterrupt):
            sequence.result()
        assert not engine._owned
    assert sequence.result().reason == "length"


class Interrupter:
    """Raises KeyboardInterrupt when a line of the package's Python is about to run for the n-th time; else notes all that run."""

    def __init__(self, line: tuple[str, int] | None = None, occasion: int = 0) -> None:
        self.line, self.left = line, occasion
        self.seen: Counter[tuple[str, int]] = Counter()

    def __enter__(self) -> Interrupter:
        sys.settrace(self.trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)

    def trace(self, frame: Any, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if "/kvstrata/" not in file:
            return None
        if event == "line":
            here = (file, frame.f_lineno)
            self.seen[here] += 1
            if here == self.line and self.seen[here] == self.left:
                raise KeyboardInterrupt
        return self.trace


def first_logits(engine: Engine, prompt: list[int]) -> torch.Tensor:
    recorder = Recorder()
    (sequence,) = engine.generate([prompt], max_new_tokens=1, processors=[recorder])
    assert not sequence.error
    return recorder.scores[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupts in __del__ can only be told
@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_interrupted_at_every_line(make_engine: Callable[..., Engine], model: str) -> None:
    """Nothing hangs, nothing leaks, and what was published is what its tokens say."""
    engine = make_engine(model, gpu_pages=16)
    reference = Engine(engine.model, engine.tokenizer, engine.cache, reuse=False)
    prompts = [words(40, seed=seed) for seed in range(2)]
    wanted = [expected(engine, prompt, 9) for prompt in prompts]

    def run(interrupter: Interrupter) -> None:
        sequences = [engine.submit(Request(prompt, Sampling(max_new_tokens=9))) for prompt in prompts]
        with interrupter, suppress(KeyboardInterrupt):
            while not all(sequence.finished for sequence in sequences):
                engine.step()
                engine.advance()  # as result() does
        for prompt, sequence, output in zip(prompts, sequences, wanted, strict=True):
            sequence.result()
            assert sequence.reason in ("length", "error"), sequence.error
            assert sequence.output == output[: len(sequence.output)]
            if interrupter.line:
                known = prompt + sequence.output + [0]
                assert torch.allclose(first_logits(engine, known), first_logits(reference, known), atol=1e-4)
        assert not engine.scheduler.live
        assert not engine._owned
        assert engine.cache.stats()["open_leases"] == 0

    lines = Interrupter()
    run(lines)
    assert len(lines.seen) > 200
    for line, times in lines.seen.items():
        for occasion in {1, min(times, 3)}:
            try:
                run(Interrupter(line, occasion))
            except AssertionError as error:
                raise AssertionError(f"interrupted at {line}, occasion {occasion}: {error}") from error
    engine.cache.check_integrity()
