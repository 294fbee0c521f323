"""What get_page_table costs for a batch of so many tokens, in both forms, against a plain loop over them. Limit: 1 ms for 4,096.

    OMP_WAIT_POLICY=passive .venv/bin/python benchmarks/page_table.py [--tokens 4096] [--requests 8] [--device cuda] [--json]

Medians of many calls of the cache classes, wall time. The results are compared with the loop's before anything is measured. Exits
with 1 above the limit.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from kvstrata.static_cache import KDeepSeekV3Cache, KVC2StaticCache

LIMIT_MS = 1.0
MODEL = {"num_hidden_layers": 1, "kv_lora_rank": 3, "qk_rope_head_dim": 1}  # so that the pool is small


def batch(tokens: int, requests: int, page_size: int, device: str) -> tuple[SimpleNamespace, tuple[torch.Tensor, ...], list[Any]]:
    """A prefill of ragged requests that begin in the middle, in both forms, and as (position, block table) of every token."""
    lengths = [tokens // requests + 17 * (number - requests // 2) for number in range(requests)]
    lengths[-1] += tokens - sum(lengths)
    starts = [1000 * number + 5 for number in range(requests)]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    pages = [-(-end // page_size) for end in ends]
    rows = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)).to(torch.int32) + 1
    tables = list(rows.split(pages))

    def ints(values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(device)

    positions = [position for start, end in zip(starts, ends, strict=True) for position in range(start, end)]
    mini = SimpleNamespace(
        prefill_batch=requests,
        p_q_len=ints(lengths),
        p_position_ids=ints(positions),
        p_block_tables=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).to(device),
        max_q_len=max(lengths),
    )
    indptr = [ints(torch.tensor([0, *counts]).cumsum(0)) for counts in (lengths, pages)]
    flat = (ints(positions), *indptr, rows.to(device), ints([tokens]))
    of_token = [table.tolist() for table, length in zip(tables, lengths, strict=True) for _ in range(length)]
    return mini, flat, list(zip(positions, of_token, strict=True))


def plain(tokens: list[Any], page_size: int) -> list[tuple[int, int]]:
    return [(table[position // page_size], position % page_size) for position, table in tokens]


def median_ms(call: Callable[[], object], device: str, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[rounds // 10 :]) * 1e3


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, default=4096)
    options.add_argument("--requests", type=int, default=8)
    options.add_argument("--page-size", type=int, default=256)
    options.add_argument("--rounds", type=int, default=500)
    options.add_argument("--threads", type=int, default=1, help="of torch")
    options.add_argument("--device", default="cpu")
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    size = given.page_size
    mini, flat, tokens = batch(given.tokens, given.requests, size, given.device)
    settings = {"kvc2": {"gpu_only": True, "gpu_memory_size_GB": 8192 * (flat[3].numel() + 16) * 1e-9}}
    first = KVC2StaticCache(MODEL, page_size=size, device=given.device, settings=settings)
    second = KDeepSeekV3Cache(MODEL, cache=first.cache)
    wanted = plain(tokens, size)
    page_idx, page_offset = first.get_page_table(mini)
    real = torch.arange(page_idx.shape[1], device=page_idx.device) < mini.p_q_len[:, None]
    for found in ((page_idx[real], page_offset[real]), second.get_page_table(*flat)):
        if list(zip(*(one.tolist() for one in found), strict=True)) != wanted:
            raise SystemExit("the page tables are not those of a plain loop")
    row = {
        "case": "page_table",
        "tokens": given.tokens,
        "requests": given.requests,
        "page_size": size,
        "device": given.device,
        "mini_batch_ms": round(median_ms(lambda: first.get_page_table(mini), given.device, given.rounds), 3),
        "indptr_ms": round(median_ms(lambda: second.get_page_table(*flat), given.device, given.rounds), 3),
        "plain_loop_ms": round(median_ms(lambda: plain(tokens, size), "cpu", 20), 3),
        "limit_ms": LIMIT_MS * given.tokens / 4096,
        "load_average": os.getloadavg()[0],
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
    }
    first.close()
    print(json.dumps({"rows": [row]}) if given.json else "\n".join(f"{name:16} {value}" for name, value in row.items()))
    sys.exit(max(row["mini_batch_ms"], row["indptr_ms"]) > row["limit_ms"])


if __name__ == "__main__":
    main()
