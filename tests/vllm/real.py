"""Real engines and servers in processes of their own, and the models they run."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BLOCK, PAGE, POOL = 32, 64, 45  # tokens, tokens, blocks of vLLM's pool: a prompt of 970 tokens pushes another one out
LONGEST = POOL * BLOCK - BLOCK
PATIENCE = 400  # seconds for what a busy machine does in thirty


def transfer(disk: Path | None, policy: str | None = "recompute", cpu: str = "300MB", page: int = PAGE) -> dict[str, Any]:
    """kv_transfer_config."""
    config: dict[str, Any] = {"attn.page_size": page, "kvc2.cpu_memory_size_GB": cpu, "kvc2.io_threads": 2}
    config["kvc2.load_deadline_s"] = 120  # what is to come comes, however busy the machine
    if disk is not None:
        config |= {"kvc2.disk_path": str(disk), "kvc2.disk_size_GB": "400MB", "kvc2.disk_reserve_free_GB": 0}
    given = {"kv_connector": "KVStrataConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"config": config}}
    return given | ({"kv_load_failure_policy": policy} if policy else {})


def environment(**more: str) -> dict[str, str]:
    """One thread: results are compared number by number."""
    return {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        **more,
    }


def run_engine(model: Path, steps: list[dict[str, Any]], *, in_process: bool = True, **engine: Any) -> dict[str, Any]:
    """What a real engine makes of the steps: {"steps": [...], "sources": tokens by where they were cached}."""
    settings = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": LONGEST,
        "block_size": BLOCK,
        "num_gpu_blocks_override": POOL,
        "enforce_eager": True,
        "max_num_seqs": 4,
        "seed": 0,
        "disable_log_stats": False,
        "skip_tokenizer_init": True,
        **engine,
    }
    ours = environment(VLLM_ENABLE_V1_MULTIPROCESSING="0" if in_process else "1")
    process = subprocess.Popen(
        [sys.executable, str(HERE / "engine_process.py")],
        env=os.environ | ours,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(json.dumps({"engine": settings, "steps": steps}), timeout=PATIENCE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for line in output.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    raise AssertionError(output[-3000:] + errors[-3000:])


class Server:
    """vLLM's OpenAI server as a process."""

    def __init__(self, model: Path, log: Path, *arguments: str, **kv: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--block-size", str(BLOCK)]
        command += [
            "--num-gpu-blocks-override",
            str(POOL),
            "--max-model-len",
            str(LONGEST),
            "--enforce-eager",
            "--max-num-seqs",
            "8",
        ]
        command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer(**kv)), *arguments]
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=os.environ | environment(VLLM_SERVER_DEV_MODE="1"),
                stdout=output,
                stderr=output,
                cwd=log.parent,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self) -> None:
        """Until it answers."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log[-4000:]
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        raise AssertionError(f"no answer: {self.log[-4000:]}")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE) as answer:
            text: str = answer.read().decode()
            return text

    def post(self, path: str, body: dict[str, Any] | None = None, timeout: float = PATIENCE) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read().decode()
            return json.loads(text) if text else None

    def complete(self, prompt: Any, new: int = 8, timeout: float = PATIENCE, **more: Any) -> dict[str, Any]:
        """{"text", "logprobs", "cached": tokens}."""
        body = {"model": "m", "prompt": prompt, "max_tokens": new, "temperature": 0, "logprobs": 1, "ignore_eos": True, **more}
        answer = self.post("/v1/completions", body, timeout)
        (choice,) = answer["choices"]
        details = answer["usage"]["prompt_tokens_details"] or {}
        return {
            "text": choice["text"],
            "logprobs": choice["logprobs"]["token_logprobs"],
            "cached": details.get("cached_tokens") or 0,
            "finish": choice["finish_reason"],
        }

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric, summed over what the labels leave open."""
        total = 0.0
        for line in self.get("/metrics").splitlines():
            if (
                line.startswith(name)
                and line[len(name)] in "{ "
                and all(f'{key}="{value}"' in line for key, value in labels.items())
            ):
                total += float(line.rpartition(" ")[2])
        return total

    def end(self, how: int) -> None:
        """Sends the signal to the server and all it started, and waits until they are gone."""
        with suppress(ProcessLookupError):
            if how == signal.SIGKILL:
                os.killpg(self.process.pid, how)
            else:
                self.process.send_signal(how)
        try:
            self.process.wait(PATIENCE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def serving(model: Path, log: Path, *arguments: str, **kv: Any) -> Iterator[Server]:
    """A server that answers; killed at the end if it still lives."""
    server = Server(model, log, *arguments, **kv)
    try:
        server.wait()
        yield server
    finally:
        server.end(signal.SIGKILL)
