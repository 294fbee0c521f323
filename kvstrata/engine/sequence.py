"""One request on its way through the engine, and the handle its caller holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.arguments import MediaItem
from kvstrata.engine.sampling import Sampler, Sampling

if TYPE_CHECKING:
    from kvstrata.lease import Lease


@dataclass(frozen=True)
class Request:
    """What a caller asks for.

    `prompt`: text, or token ids. `adapter`: the content digest of the LoRA adapter that is active in the model while it runs (see
    PrefixCache.lease), `media`: what placeholder tokens of the prompt stand for. `on_token` is called with every new token, on the
    thread that makes the step.
    """

    prompt: str | Tokens[int]
    sampling: Sampling = field(default_factory=Sampling)
    tenant: str | None = None
    on_token: Callable[[int], None] | None = None
    adapter: Any = None
    media: Tokens[MediaItem] = ()


@dataclass
class Stats:
    """Tokens of the prompt: `reused` per tier + `computed`. Times run from submission to the first output token; None before it."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    reused_tokens: dict[str, int] = field(default_factory=lambda: {"gpu": 0, "cpu": 0, "disk": 0})
    output_tokens: int = 0
    ttft_s: float | None = None
    ttft_cpu_s: float | None = None  # CPU seconds of the whole process


class Sequence:
    """A submitted request: iterate over it for its tokens as they come, or over `pieces()` for text; or wait for `result()`.

    `output`: the new tokens. `reason`: None while it runs, then "eos", "stop", "length", "cancelled", "refused" or "error"; for the
    last two `error` says why in a sentence. Only the engine changes it; `cancel()` may be called from any thread.
    """

    def __init__(self, number: int, request: Request, tokenizer: Any, advance: Callable[[], None]) -> None:
        self.number = number
        self.request = request
        self.prompt: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self.media: tuple[MediaItem, ...] = ()
        self.output: list[int] = []
        self.reason: str | None = None
        self.error: str | None = None
        self.cancelled = False
        self.stats = Stats()
        self._tokenizer = tokenizer
        self._advance = advance
        self._submitted = time.monotonic(), time.process_time()
        # Of the engine. KV states of the first `computed` tokens are written; those of the newest token never are yet.
        self.sampler: Sampler | None = None
        self.ids = torch.empty(0)  # int64 `[limit]`: the tokens, on the model's device, from when it begins
        self.lease: Lease | None = None
        self.leased_at = (0.0, 0, 0)  # time, forward and published pages of the engine when the lease was taken
        self.deadline = 0.0
        self.admitted = self.begun = self.renewed = False
        self.hit = self.computed = 0
        self.fence = 0
        self.past: Any = None  # cache layers of models that do not read pages

    @property
    def finished(self) -> bool:
        return self.reason is not None

    @property
    def length(self) -> int:
        """Tokens so far, prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def limit(self) -> int:
        """The most tokens it can come to."""
        return len(self.prompt) + self.request.sampling.max_new_tokens

    @property
    def text(self) -> str:
        """The output so far, without special tokens, cut at the first stop string."""
        return self._cut(self._decode(self.output)) if self.output else ""  # a refused one may have no stop strings to cut at

    def cancel(self) -> None:
        """End it at the engine's next step. What was computed stays in the cache."""
        self.cancelled = True

    def result(self) -> Sequence:
        """Run or wait until it is finished; returns itself."""
        while not self.finished:
            self._advance()
        return self

    def __iter__(self) -> Iterator[int]:
        seen = 0
        while True:
            last = self.finished  # read before the output: what came in between is yielded in the next round
            while seen < len(self.output):
                yield self.output[seen]
                seen += 1
            if last:
                return
            self._advance()

    def pieces(self) -> Iterator[str]:
        """The text as it comes, in whole characters; held back where it may be the beginning of a stop string."""
        if self.reason == "refused":
            return
        hold = max((len(stop) for stop in self.request.sampling.stops), default=1) - 1
        window: list[int] = []  # the last tokens: how a token decodes may depend on the one before it
        known = text = ""
        given = 0
        for token in self:
            window.append(token)
            decoded = self._decode(window)
            if not decoded.endswith("\ufffd"):  # else half a character
                text += decoded[len(known) :]
                window = window[-4:]
                known = self._decode(window)
                end = len(text) - hold
                if end > given and self._cut(text) == text:
                    yield text[given:end]
                    given = end
        yield from [rest] if (rest := self.text[given:]) else []

    def arrived(self, token: int) -> None:
        """Of the engine: take the next token."""
        if not self.output:
            wall, cpu = self._submitted
            self.stats.ttft_s, self.stats.ttft_cpu_s = time.monotonic() - wall, time.process_time() - cpu
        self.output.append(token)
        self.stats.output_tokens = len(self.output)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _cut(self, text: str) -> str:
        ends = [at for stop in self.request.sampling.stops if (at := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text
