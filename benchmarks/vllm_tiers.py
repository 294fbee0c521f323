"""Groups of prompts with a shared beginning, round robin through vLLM, with a device pool for two groups; then a restart and the
same again.

    make build/.vllm-wheel
    OMP_WAIT_POLICY=passive .venv-vllm/bin/python benchmarks/vllm_tiers.py [--systems none,native,kvstrata] [--json FILE]

SmolLM2-135M on vLLM's CPU build, one thread, one request at a time. `none`: no connector. `native`: vLLM's own offloading to CPU
memory with its file tier; its copies to the device are for GPUs, so here they are done by torch (benchmarks/vllm_native.py). Per
phase: CPU seconds of the process and wall seconds of all requests, and the median time to the first token, which is the time of a
request, since it asks for one token. `--overhead`: prompts that never hit; the share of the run's CPU time that is spent in our
calls and threads.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCK = 32
THREADS = ("kvstrata", "iou-")  # names of ours begin so


def prompts_of(options: argparse.Namespace) -> list[list[int]]:
    """Round robin: the first prompt of each group, then the second of each."""
    import numpy as np

    dice = np.random.default_rng(0)
    if options.overhead:
        return [dice.integers(1000, 40000, options.shared + options.own).tolist() for _ in range(options.groups * options.each)]
    shared = [dice.integers(1000, 40000, options.shared).tolist() for _ in range(options.groups)]
    return [one + dice.integers(1000, 40000, options.own).tolist() for _ in range(options.each) for one in shared]


def connector(system: str, folder: str) -> dict[str, Any] | None:
    """kv_transfer_config."""
    if system == "none":
        return None
    if system == "native":
        tiers = [{"type": "fs", "root_dir": f"{folder}/native"}]
        extra = {
            "spec_name": "HostTiering",
            "spec_module_path": "vllm_native",
            "cpu_bytes_to_use": 1 << 30,
            "secondary_tiers": tiers,
        }
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    config = {
        "attn.page_size": 64,
        "kvc2.cpu_memory_size_GB": "1GiB",
        "kvc2.disk_path": f"{folder}/ours",
        "kvc2.disk_size_GB": 4,
        "kvc2.disk_reserve_free_GB": 0,
    }
    return {"kv_connector": "KVStrataConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"config": config}}


def phase(options: argparse.Namespace) -> None:
    """One process: all requests, one after the other."""
    from vllm import LLM, SamplingParams

    from kvstrata.models import smollm2_path

    length = options.shared + options.own
    llm = LLM(
        str(smollm2_path()),
        dtype="float32",
        block_size=BLOCK,
        max_model_len=length + 64,
        num_gpu_blocks_override=2 * (options.shared + options.each * options.own) // BLOCK + 2,
        enforce_eager=True,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        kv_transfer_config=connector(options.phase, options.folder),
    )
    one_token = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    llm.generate({"prompt_token_ids": [7] * 40}, one_token, use_tqdm=False)  # what torch prepares at a first use
    spent = _watched(llm) if options.overhead and options.phase == "kvstrata" else {"calls": 0.0}
    threads, cpu, wall, first, cached = _threads(), time.process_time(), time.perf_counter(), [], 0
    for prompt in prompts_of(options):
        began = time.perf_counter()
        (answer,) = llm.generate({"prompt_token_ids": prompt}, one_token, use_tqdm=False)
        first.append(time.perf_counter() - began)
        cached += answer.num_cached_tokens or 0
    found = {
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "ttft_s": statistics.median(first),
        "cached": cached,
        "ours_s": spent["calls"] + _threads() - threads,
    }
    time.sleep(2.0)  # what is still being written may go on: every system has the same chance
    print("RESULT " + json.dumps(found), flush=True)


def _threads() -> float:
    """CPU seconds of our own threads so far."""
    total = 0.0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith(THREADS):
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _watched(llm: Any) -> dict[str, float]:
    """The CPU time that vLLM's threads spend in calls of ours from now on."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    spent = {"calls": 0.0}

    def timed(call: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*given, **named)
            finally:
                spent["calls"] += time.thread_time() - began

        return run

    core = llm.llm_engine.engine_core.engine_core
    scheduler = core.scheduler.connector.scheduler
    for name in ("arrived", "matched", "admitted", "plan", "reported", "finished", "take_stats", "take_events"):
        setattr(scheduler, name, timed(getattr(scheduler, name)))
    worker = get_kv_transfer_group().worker
    for name in ("load", "save", "take_loaded", "take_report"):
        setattr(worker, name, timed(getattr(worker, name)))
    return spent


def run(options: argparse.Namespace, system: str, folder: str) -> dict[str, Any]:
    """A phase in a process of its own."""
    ours = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    command = [sys.executable, __file__, "--phase", system, "--folder", folder]
    command += [f"--{name}={getattr(options, name)}" for name in ("groups", "each", "shared", "own")]
    command += ["--overhead"] if options.overhead else []
    ended = subprocess.run(command, env=ours, capture_output=True, text=True, cwd=folder)
    for line in ended.stdout.splitlines():
        if line.startswith("RESULT "):
            found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return found
    raise SystemExit(f"{system}: {ended.stdout[-1500:]}{ended.stderr[-1500:]}")


def _tell(found: dict[str, Any]) -> None:
    times = f"cpu {found['cpu_s']:7.1f} s  wall {found['wall_s']:7.1f} s  ttft {found['ttft_s']:6.3f} s"
    share = 100 * found["ours_s"] / found["cpu_s"]
    print(f"{found['system']:9} {found['phase']:16} {times}  cached {found['cached']:7,} tokens  ours {share:.2f} %", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="none,native,kvstrata")
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--each", type=int, default=4, help="prompts of a group")
    parser.add_argument("--shared", type=int, default=1600, help="tokens")
    parser.add_argument("--own", type=int, default=400, help="tokens")
    parser.add_argument("--overhead", action="store_true", help="prompts that never hit, kvstrata alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase:
        phase(options)
        return
    results = []
    for system in ["kvstrata"] if options.overhead else options.systems.split(","):
        folder = tempfile.mkdtemp(prefix="kvstrata-bench-")
        try:
            for name in ("first", "after a restart")[: 1 if options.overhead else 2]:
                found = run(options, system, folder) | {"system": system, "phase": name}
                results.append(found)
                _tell(found)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
