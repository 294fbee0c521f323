"""One process of the demo: model, cache and engine, and the requests that are made in it.

It tells its parent what happens, as lines of JSON on stdout. There are two such processes: the second starts after the first has
ended, and finds on disk what that one left there.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvstrata.cache import PrefixCache
from kvstrata.config import Settings
from kvstrata.demo.journal import Journal
from kvstrata.demo.prompts import Prompts, TextTooShort, make_prompts
from kvstrata.demo.sizes import ANSWER_TOKENS, Sizes, make_sizes
from kvstrata.demo.spec import TIERS, Spec
from kvstrata.engine import Engine, Request, Sampling
from kvstrata.engine import Sequence as Running
from kvstrata.identity import SecretError
from kvstrata.layout import PageLayout
from kvstrata.models import ModelError, load_model
from kvstrata.units import readable

SETTLE_S = 60.0  # for what is on its way to a lower tier; on a sound disk it takes a fraction of a second


class Failed(Exception):
    """A request did not run, or not as it must for the demo to mean anything. One sentence."""


# What may not fit, found before anything runs: the model, its settings, the machine.
PROBLEMS = (ModelError, TextTooShort, SecretError, Failed, ValueError, RuntimeError, OSError)


class Process:
    """Runs the requests of one process; `tell` takes (kind, fields). Raises what PROBLEMS lists, one sentence each."""

    def __init__(self, spec: Spec, tell: Any) -> None:
        self.spec, self.tell = spec, tell
        device = spec.device if spec.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        model, self.tokenizer = load_model(spec.model, spec.dtype, device)
        settings = Settings.load(spec.config, spec.overrides)
        self.page_size = settings.attn.page_size
        self.prompts: Prompts = make_prompts(self.tokenizer, self.page_size, settings.chunk)
        self.sizes: Sizes = make_sizes(max(map(len, self.prompts.tokens)), self.page_size)
        self.pages = self.prompts.boundary // self.page_size
        banner: list[str] = []
        self.cache = PrefixCache.open(model, self._settings(settings, model), weights=spec.model, say=banner.append)
        if self.cache.limits.disk_bytes < self._disk_bytes:
            raise Failed(f"The demo needs {readable(self._disk_bytes)} of disk: set kvc2.disk_size_GB to more.")
        self.engine = Engine(model, self.tokenizer, self.cache, max_batch_size=1)
        self.journal = Journal(bytes.fromhex(key) for key in spec.pages)
        self._others = 0  # tokens of the text that other prompts have used
        self.tell(
            "setup",
            model=Path(spec.model).name,
            prompt_tokens=len(self.prompts.tokens[0]),
            shared_tokens=self.prompts.shared,
            page_size=self.page_size,
            pages=self.pages,
            banner=banner,
        )

    def _settings(self, settings: Settings, model: Any) -> Settings:
        """The user's settings with tiers as small as the demo needs them, so that little traffic fills them."""
        row = PageLayout.from_config(model.config, page_size=self.page_size, dtype=self.spec.dtype).row_stride
        self._disk_bytes = self.sizes.disk_pages * row
        ours: dict[str, Any] = {
            "max_batch_size": 1,
            "kvc2.gpu_memory_size_GB": f"{(self.sizes.gpu_pages + 1) * row}B",  # and the scratch row
            "kvc2.cpu_memory_size_GB": f"{self.sizes.cpu_pages * row}B",
        }
        if self.spec.own_disk:  # another one keeps its size: a smaller one would drop what is in it
            ours["kvc2.disk_size_GB"] = f"{self._disk_bytes}B"
        if settings.origin("kvc2.load_deadline_s") == "default":
            ours["kvc2.load_deadline_s"] = 30  # computing after all would be right for a service, and spoil the demo
        return Settings.load(self.spec.config, self.spec.overrides | ours)

    def first(self) -> None:
        """Everything before the restart."""
        for question in (0, 1):
            self.reference(question)
        self.case("cold", 0)
        self.case("gpu", 1)
        self.push(self.sizes.past_gpu, "GPU pool")
        self.case("cpu", 0)
        self.push(self.sizes.past_cpu, "CPU tier")
        self.case("disk", 0)

    def restart(self) -> None:
        """What the process after it does, once it is up: what torch builds at a first use is no part of the request's time."""
        engine = Engine(self.engine.model, self.tokenizer, self.cache, max_batch_size=1, reuse=False)
        for _ in self._run(engine, self.prompts.other(0, self.page_size + 1), 2):
            pass
        self.case("restart", 0)

    def reference(self, question: int) -> None:
        """The answer of a run with the cache off, on the same pages and chunks."""
        self.tell("begin", case="off", said=self.prompts.questions[question])
        engine = Engine(self.engine.model, self.tokenizer, self.cache, max_batch_size=1, reuse=False)
        for running in self._run(engine, self.prompts.tokens[question], ANSWER_TOKENS):
            self.tell("progress", done={"computed": running.computed // self.page_size}, answer=running.text)
        self.tell("reference", question=question, output=running.output)

    def push(self, lengths: tuple[int, ...], tier: str) -> None:
        """Other prompts, until the text has left the tier."""
        prompts = "another prompt" if len(lengths) == 1 else f"{len(lengths)} other prompts"
        self.tell("begin", case="others", said=f"{prompts} of {sum(lengths):,} tokens, to fill the {tier}")
        before = 0
        for length in lengths:
            prompt = self.prompts.other(self._others, length)
            self._others += length
            for running in self._run(self.engine, prompt, 1):
                done = min((before + running.computed) * self.pages // sum(lengths), self.pages)
                self.tell("progress", done={"computed": done})
            before += length
        self.tell("done")

    def case(self, name: str, question: int) -> None:
        """A request of the table, and what proves where its pages came from."""
        faults = [] if name == "cold" else self.journal.faults_before(name)
        self.journal.begin()
        self.tell("begin", case=name, said=self.prompts.questions[question])
        seen = []
        for running in self._run(self.engine, self.prompts.tokens[question], ANSWER_TOKENS):
            seen += self._events
            self.tell("progress", done=self._origins(name, running), answer=running.text)
        if name == "cold":
            self.journal.learn(seen, self.pages)
        else:
            faults += self.journal.faults_after(name)
        stats = running.stats
        wanted = dict.fromkeys(TIERS, 0)
        if name != "cold":
            wanted["disk" if name == "restart" else name] = self.prompts.boundary
        for tier in TIERS:
            if (stats.reused_tokens[tier] < wanted[tier]) or (stats.reused_tokens[tier] and not wanted[tier]):
                faults.append(f"{stats.reused_tokens[tier]} tokens were reused from {tier}, not {wanted[tier]}")
        self.tell(
            "row",
            row={
                "case": name,
                "ttft_s": stats.ttft_s,
                "cpu_s": stats.ttft_cpu_s,
                "computed_tokens": stats.computed_tokens,
                "reused_tokens": stats.reused_tokens,
                "output_sha256": hashlib.sha256(running.text.encode()).hexdigest(),
            },
            question=question,
            output=running.output,
            faults=faults,
        )

    def close(self) -> None:
        """Waits until everything is on disk, as a service does that is stopped in an orderly way."""
        saved = self.cache.close(SETTLE_S)
        self.tell("closed", saved=saved, pages=[key.hex() for key in self.journal.pages])

    def _run(self, engine: Engine, prompt: Any, tokens: int) -> Iterator[Running]:
        """Runs one request to its end, alone; yields it after every step. Raises Failed."""
        running = engine.submit(Request(prompt, Sampling(max_new_tokens=tokens), tenant=self.spec.tenant))
        while not running.finished:
            engine.step()
            self._note_events()
            yield running
        if running.error:
            raise Failed(running.error)
        # What was computed goes down to the CPU tier and to disk meanwhile; the next request must not overtake it.
        if engine.reuse and not self.cache.flush(SETTLE_S):
            raise Failed(f"The disk under {self.cache.limits.disk_path} did not take the pages within {SETTLE_S:.0f} s.")
        self._note_events()
        yield running

    def _note_events(self) -> None:
        self._events = self.cache.drain_events()
        self.journal.add(self._events)

    def _origins(self, name: str, running: Running) -> dict[str, int]:
        """Pages of the text that the running request has, by where they came from."""
        if name == "cold":
            return {"computed": min(running.computed // self.page_size, self.pages)}
        if name == "gpu":
            return {"gpu": self.pages if running.sampler else 0}
        loaded = self.journal.moved("cpu", "disk")
        return {"disk": loaded} if name in ("disk", "restart") else {"cpu": self.journal.moved("gpu", "cpu")}


def run(spec: Spec) -> int:
    """The life of a process of the demo; its exit status. 2: a sentence on stderr says what does not fit."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints goes to stderr: stdout carries the lines for the parent, and nothing else

    def tell(kind: str, **fields: Any) -> None:
        out.write(json.dumps({"kind": kind, **fields}) + "\n")

    try:
        process = Process(spec, tell)
    except PROBLEMS as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    try:
        (process.restart if spec.restart else process.first)()
    except Failed as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the parent is gone
        return 1
    process.close()
    return 0
