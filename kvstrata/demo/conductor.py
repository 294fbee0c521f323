"""The demo as a whole: starts its two processes one after the other, shows what they tell, and makes the report.

It imports neither torch nor the core, so what it needs of time and memory is nothing beside the processes it starts.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from kvstrata.demo.spec import Spec
from kvstrata.demo.view import View


class ProcessFailed(Exception):
    """A process of the demo ended early. `status`: its exit status; the text is what it wrote on stderr."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Conductor:
    """`report` is the object that --json prints, complete after run(). `faults`: what did not go as it must, a sentence each."""

    def __init__(self, spec: Spec, view: View) -> None:
        self.spec, self.view = spec, view
        self.setup: dict[str, Any] = {}
        self.report: dict[str, Any] = {}
        self.faults: list[str] = []
        self.same: dict[str, bool] = {}  # case -> its text equals that of the run with the cache off
        self._references: dict[int, list[int]] = {}
        self._rows: list[dict[str, Any]] = []
        self._pages: tuple[str, ...] = ()

    def run(self) -> None:
        """Raises ProcessFailed."""
        for message in self._process(self.spec):
            self._take(message)
        self.view.say("The process has ended; another one starts.")
        for message in self._process(replace(self.spec, restart=True, pages=self._pages)):
            self._take(message)
        cold = next(row["ttft_s"] for row in self._rows if row["case"] == "cold")
        for row in self._rows:
            row["speedup"] = cold / row["ttft_s"]
            row["output_sha256"] = row.pop("output_sha256")  # last
        self.report = {
            "model": self.setup["model"],
            "prompt_tokens": self.setup["prompt_tokens"],
            "shared_tokens": self.setup["shared_tokens"],
            "page_size": self.setup["page_size"],
            "rows": self._rows,
            "identical": all(self.same.values()),
        }
        self.faults += [f"{case}: the text differs from that with the cache off" for case, same in self.same.items() if not same]

    def _process(self, spec: Spec) -> Iterator[dict[str, Any]]:
        """Runs a process to its end and yields what it tells."""
        command = [sys.executable, "-m", "kvstrata", "demo", "--process", json.dumps(asdict(spec))]
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", **os.environ},
            )
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    yield json.loads(line)
                status = process.wait()
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
                process.stdout.close()
            if status != 0:
                errors.seek(0)
                raise ProcessFailed(status, errors.read().decode(errors="replace").strip())

    def _take(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "setup":
                if not self.setup:
                    self.setup = message
                    self.view.settings(f"{message['model']}, {self.spec.dtype}", message["banner"])
            case "begin":
                self.view.begin(message["case"], self.setup["pages"], message["said"])
            case "progress":
                self.view.update(done=message["done"], answer=message.get("answer", ""))
            case "done":
                self.view.end()
            case "reference":
                self._references[message["question"]] = message["output"]
                self.view.end()
            case "row":
                row = message["row"]
                self._rows.append(row)
                self.same[row["case"]] = message["output"] == self._references[message["question"]]
                self.faults += [f"{row['case']}: {fault}" for fault in message["faults"]]
                self.view.end()
            case "closed":
                self._pages = tuple(message["pages"])
                if not message["saved"]:
                    self.faults.append("a process could not save everything before it ended")
