"""Choosing the next token of one request with transformers' own logits processors and stopping criteria."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvstrata.arguments import check_flag, check_number, check_whole

MOST_TOKENS = (1 << 31) - 1


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen and when it ends. The defaults are greedy.

    `temperature` 0 means greedy, and `top_k`, `top_p`, `min_p` and `seed` then have no effect. `stop` strings end the output when
    they appear in it (the prompt does not count) and are cut from the text. `processors` and `criteria` are transformers objects
    for what is not named here; processors see prompt and output, criteria the output alone.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    processors: Sequence[Any] = field(default=(), repr=False)
    criteria: Sequence[Any] = field(default=(), repr=False)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def check(self) -> None:
        """Raises ValueError with a sentence that names the value."""
        check_whole("max_new_tokens", self.max_new_tokens, 1, MOST_TOKENS)
        check_whole("top_k", self.top_k, 0, MOST_TOKENS)
        if self.seed is not None:
            check_whole("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        check_number("temperature", self.temperature, "a number, 0 or above", lambda value: value >= 0)
        check_number("top_p", self.top_p, "a number above 0 and at most 1", lambda value: 0 < value <= 1)
        check_number("min_p", self.min_p, "a number from 0 to 1", lambda value: 0 <= value <= 1)
        check_number("repetition_penalty", self.repetition_penalty, "a number above 0", lambda value: value > 0)
        check_flag("ignore_eos", self.ignore_eos)
        texts = [self.stop] if isinstance(self.stop, str) else self.stop
        if not (isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts)):
            raise ValueError(f"stop must be a string or a list of strings, not {self.stop!r}")
        if not all(self.stops):
            raise ValueError(f"stop strings must not be empty, not {self.stop!r}")
        for name, given in (("processors", self.processors), ("criteria", self.criteria)):
            if not isinstance(given, list | tuple) or not all(callable(one) for one in given):
                raise ValueError(f"{name} must be a list of transformers' objects, not {given!r}")


class Sampler:
    """The state of one request's sampling: its processors, its criteria and its own random generator."""

    def __init__(self, sampling: Sampling, tokenizer: Any, eos: frozenset[int], device: torch.device) -> None:
        self.sampling = sampling
        self.eos = frozenset() if sampling.ignore_eos else eos
        self.generator: torch.Generator | None = None
        # The order is that of transformers' generate().
        chosen: list[Any] = list(sampling.processors)
        if sampling.repetition_penalty != 1.0:
            chosen.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.temperature > 0:
            self.generator = torch.Generator(device)
            if sampling.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed(sampling.seed)
            if sampling.temperature != 1.0:
                chosen.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                chosen.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1.0:
                chosen.append(TopPLogitsWarper(float(sampling.top_p)))
            if sampling.min_p > 0:
                chosen.append(MinPLogitsWarper(float(sampling.min_p)))
        self.processors = LogitsProcessorList(chosen)
        self.stop = StopStringCriteria(tokenizer, sampling.stops) if sampling.stops else None
        self.criteria = StoppingCriteriaList(list(sampling.criteria))

    def choose(self, tokens: Tensor, logits: Tensor) -> int:
        """The next token after `tokens` (int64 `[n]`, prompt and output) from `logits` `[vocabulary]`."""
        scores = self.processors(tokens[None], logits[None].float())
        if self.generator is None:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self.generator))

    def ended(self, output: Tensor) -> str | None:
        """Why the output (int64 `[n]`, n >= 1) ends here: "eos", "stop", "length"; None while it goes on."""
        if int(output[-1]) in self.eos:
            return "eos"
        if (self.stop and bool(self.stop(output[None], None))) or (self.criteria and bool(self.criteria(output[None], None)[0])):
            return "stop"
        return "length" if len(output) >= self.sampling.max_new_tokens else None


def eos_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The token ids that end a text, from the model's generation config, else its config, else the tokenizer."""
    for owner in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()
