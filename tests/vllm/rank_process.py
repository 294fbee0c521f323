"""One rank's worker role in a process of its own: carries out a plan from a file, and prints what it would report."""

import json
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import torch

from kvstrata.connect.vllm.worker import Worker

with open(sys.argv[1], "rb") as file:
    blocks, rank, plan, table, content, count = pickle.load(file)
width = blocks.block_bytes[0] // blocks.block_size // 4
caches = {name: torch.full((count, 1, blocks.block_size, width), -1, dtype=torch.int32) for name in blocks.layers}
nothing_known = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
worker = Worker(nothing_known, blocks, count, rank)
worker.register(caches)
if content is not None:  # the forward pass
    for cache, rows in zip(caches.values(), content, strict=True):
        for at, row in enumerate(rows):
            cache[table[at // blocks.block_size], 0, at % blocks.block_size] = torch.from_numpy(row)
worker.load(plan)
worker.save(plan)
report = worker.take_report()
np.save(f"{sys.argv[1]}.npy", np.stack([cache.numpy()[table, 0].reshape(-1, width) for cache in caches.values()]))
told = {
    "ended": report.ended if report is not None else {},
    "loaded": sorted(worker.take_loaded()),
    "bad": sorted(worker.take_bad_blocks()),
    "content": f"{sys.argv[1]}.npy",
}
print(json.dumps(told))
