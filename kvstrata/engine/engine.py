"""The embedded engine: a Hugging Face model on the page pool. One step is one forward pass: schedule -> forward -> sample."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from collections.abc import Sequence as Several
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvstrata.arguments import check_flag, check_whole, media_arrays, media_items, token_array
from kvstrata.engine.runner import PrefixLost, runner_for
from kvstrata.engine.sampling import Sampler, Sampling, eos_tokens
from kvstrata.engine.scheduler import Batch, Scheduler
from kvstrata.engine.sequence import Request, Sequence

if TYPE_CHECKING:
    from kvstrata.cache import PrefixCache

IDLE_S = 0.0005  # between two looks at what is being loaded, when there is nothing to compute
STOP_S = 0.05  # between two looks at whether to stop, when there is nothing to do at all


class Engine:
    """Runs requests on `model` (a causal LM of transformers, in eval mode) through `cache`, whose pool lies on the model's device.

    Prompts are computed in chunks that end at absolute multiples of `cache.chunk`, one request at a time and never together with
    decoding requests; requests decode together, at most `max_batch_size`. `reuse=False` computes every prompt anew, on the same
    pages and chunks, and publishes nothing: the reference. Raises ValueError, with one sentence, for a model that does not fit the
    cache.

    Thread-safe: any number of threads may submit, cancel, iterate over sequences or wait for them. One of them at a time makes a
    step for all; where a thread sits in `run`, that one does. What a step calls (on_token, processors, criteria) may submit and
    cancel, but not wait. An interrupt (Ctrl-C) in the middle of a step ends all requests that had begun, gives back what they held,
    and goes on to the caller.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        cache: PrefixCache,
        *,
        max_batch_size: int | None = None,
        reuse: bool = True,
    ) -> None:
        if not hasattr(model, "config") or not hasattr(model, "forward"):
            raise ValueError(f"model must be a causal language model of transformers, not {type(model).__name__}")
        max_batch_size = cache.max_batch_size if max_batch_size is None else max_batch_size
        check_whole("max_batch_size", max_batch_size, 1, 65536, "requests")
        check_flag("reuse", reuse)
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.reuse = reuse
        self.runner = runner_for(model, cache)
        self.scheduler = Scheduler(cache, self.runner, max_batch_size if self.runner.together else 1, reuse)
        self.eos = eos_tokens(model, tokenizer)
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self.max_positions: int = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 62
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._stepping = threading.RLock()  # over everything a step changes
        self._driver: threading.Thread | None = None
        self._interrupted = False
        self._inside = False  # a step, on the thread that holds `_stepping`

    # ---- what callers use ----

    def submit(self, request: Request) -> Sequence:
        """Queue a request; never raises for what is in it: the sequence returned says what was wrong with it."""
        sequence = Sequence(next(self._numbers), request, self.tokenizer, self.advance)
        try:
            error = self._objection(sequence)
        except Exception as problem:  # whatever a processor or a tokenizer says to the values it was given
            error = str(problem) or type(problem).__name__
        if error:
            sequence.error, sequence.reason = error, "refused"
        else:
            with self._changed:
                self.scheduler.live[sequence.number] = sequence
                self._changed.notify_all()
        return sequence

    def _objection(self, sequence: Sequence) -> str:
        """Why the request can never run here; "" where it can, and is prepared for it."""
        request = sequence.request
        text, new = request.prompt, request.sampling.max_new_tokens
        prompt = token_array(self.tokenizer(text)["input_ids"] if isinstance(text, str) else text).copy()  # the caller keeps his
        sequence.prompt, sequence.stats.prompt_tokens = prompt, len(prompt)
        request.sampling.check()
        sequence.sampler = Sampler(request.sampling, self.tokenizer, self.eos, self.model.device)
        self.cache.namespace(request.adapter, request.tenant)  # raises for what cannot be either
        sequence.media = media_items(request.media)  # the caller keeps his list, too
        media_arrays(sequence.media)  # raises for what cannot be
        if getattr(self.model, "_hf_peft_config_loaded", False) and request.adapter is None:
            return "the model has adapters loaded: name the active one's content, Request(adapter=adapter_digest(folder))"
        size = f"{len(prompt):,} prompt tokens and {new:,} new ones"
        pages, rows = -(-(len(prompt) + new) // self.cache.page_size), self.cache.pool.pages - 1
        wrong = prompt[(prompt < 0) | (prompt >= self.vocabulary)]
        if not prompt.size:
            return "the prompt is empty"
        if wrong.size:
            return f"the prompt holds token {wrong[0]}, and the model knows 0 to {self.vocabulary - 1}"
        if len(prompt) + new > self.max_positions:
            return f"{size} exceed the model's {self.max_positions:,} positions"
        return f"{size} need {pages:,} pages and the pool holds {rows:,}" if pages > rows else ""

    def generate(
        self, prompts: str | Iterable[str | Several[int]], *, tenant: str | None = None, adapter: Any = None, **sampling: Any
    ) -> list[Sequence]:
        """Run prompts to their end; keywords are those of Request and Sampling. For token ids, a list of lists."""
        options = Sampling(**sampling)
        given = [prompts] if isinstance(prompts, str) else prompts
        sequences = [self.submit(Request(prompt, options, tenant, adapter=adapter)) for prompt in given]
        return [sequence.result() for sequence in sequences]

    def step(self) -> bool:
        """One forward pass; False when there was nothing to compute. Raises RuntimeError within another step of this thread."""
        self._check_outside()
        with self._stepping:
            computed = self._step()
        self._rest(computed)
        return computed

    def _step(self) -> bool:
        """The caller holds the lock."""
        self._inside = True
        try:
            if self._interrupted:  # and so was what an interrupt makes necessary
                self._abort()
            with torch.inference_mode():
                batch = self.scheduler.schedule()
                if batch:
                    self.sample(batch, self.forward(batch))
        except BaseException:
            self._interrupted = True
            self._abort()
            raise
        finally:
            self._inside = False
            with self._changed:
                self._changed.notify_all()
        return batch is not None

    def _rest(self, computed: bool) -> None:
        if not computed and self.scheduler.live:
            time.sleep(IDLE_S)

    def _check_outside(self) -> None:
        """A step within a step would compute tokens that the outer one has yet to choose."""
        if self._owned and self._inside:
            raise RuntimeError(
                "on_token must not drive the engine: it, a processor or a criterion may submit requests, but wait for none"
            )
        self._let_go()

    def _let_go(self) -> None:
        # Of the lock, as often as it is held: an interrupt may have come just before it was given back.
        while self._owned:
            self._stepping.release()

    @property
    def _owned(self) -> bool:
        """Whether this thread holds the lock of steps. The interpreter's Condition asks in the same way."""
        return bool(self._stepping._is_owned())  # type: ignore[attr-defined]

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set: the body of a serving thread. What is unfinished then ends as cancelled."""
        self._check_outside()
        self._driver = threading.current_thread()
        try:
            while not stop.is_set():
                if not self.step():
                    with self._changed:  # submit() wakes it; `stop` is looked at now and then
                        self._changed.wait_for(lambda: self.scheduler.live, STOP_S)
        finally:
            self._driver = None
            self._let_go()
            self.close()

    def advance(self) -> None:
        """Bring the requests forward: by a step, or by waiting for the thread that makes one."""
        self._check_outside()
        driven = self._driver is not None and self._driver is not threading.current_thread()
        computed = None
        try:  # from before it is taken: an interrupt may come as soon as it is
            if not driven and self._stepping.acquire(blocking=False):
                computed = self._step()
        finally:
            try:
                self._let_go()
            except BaseException:  # an interrupt once more, before it was given back
                self._let_go()
                raise
        if computed is not None:
            self._rest(computed)
        else:
            with self._changed:
                self._changed.wait(STOP_S)

    def close(self) -> None:
        """End all requests and give their leases back. Engine and cache stay usable."""
        with self._stepping:
            for sequence in list(self.scheduler.live.values()):
                self.scheduler.finish(sequence, "cancelled")

    def _abort(self) -> None:
        self.scheduler.abort()
        self._interrupted = False

    # ---- forward ----

    def forward(self, batch: Batch) -> list[Tensor | None]:
        """Compute a batch and publish the pages it completed. Per sequence its logits `[vocabulary]`; None where the pass failed
        for it.
        """
        started, first = time.monotonic(), batch.sequences[0]
        try:
            if batch.chunk:
                logits = self.runner.prefill(first, batch.chunk.start, batch.chunk.stop)
            else:
                logits = self.runner.decode(batch.sequences)
        except PrefixLost:
            self.scheduler.requeue(first)
            return [None]
        except Exception as error:
            if len(batch.sequences) > 1:  # find out whose fault it is: the others go on
                return [self.forward(Batch([sequence]))[0] for sequence in batch.sequences]
            self.scheduler.fail(first, error)
            return [None]
        self.scheduler.passed(batch, self.cache.pool.mark_batch(), time.monotonic() - started)
        return list(logits)

    # ---- sample ----

    def sample(self, batch: Batch, logits: Several[Tensor | None]) -> None:
        """Choose the next token of every sequence whose prompt is complete; end those that are done."""
        for sequence, scores in zip(batch.sequences, logits, strict=True):
            if scores is not None and not sequence.finished and sequence.computed >= len(sequence.prompt):
                with self.scheduler.guard(sequence):
                    self._sample(sequence, scores)

    def _sample(self, sequence: Sequence, scores: Tensor) -> None:
        assert sequence.sampler is not None
        assert sequence.lease is not None
        token = sequence.sampler.choose(sequence.ids[: sequence.length], scores)
        sequence.ids[sequence.length] = token
        reason = sequence.sampler.ended(sequence.ids[len(sequence.prompt) : sequence.length + 1])
        sequence.lease.append([token])
        sequence.arrived(token)
        if sequence.request.on_token:
            sequence.request.on_token(token)
        if reason:
            self.scheduler.finish(sequence, reason)
