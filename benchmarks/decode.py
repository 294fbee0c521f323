"""What it costs to decode several requests together over a shared prefix, against one alone: CPU seconds per step.

    OMP_WAIT_POLICY=passive .venv/bin/python benchmarks/decode.py [--dtype bfloat16] [--requests 4] [--json]

SmolLM2-135M, a prefix of 2,048 tokens in the pool, one engine. Rounds of one request and of several are interleaved; each counts
the CPU time of the process over a window of steps in which every request decodes. The medians are compared. `products_ratio` is the
same of the model's matrix products alone, as torch computes them: no engine that leaves the model as it is can do without them.
"""

import argparse
import json
import os
import statistics
import sys
import time

import torch
import transformers

from kvstrata.cache import PrefixCache
from kvstrata.demo.prompts import make_prompts
from kvstrata.engine import Engine, Request, Sampling
from kvstrata.models import load_model, smollm2_path


def seconds_per_step(engine: Engine, prompts: list[list[int]], steps: int) -> float:
    """CPU seconds of a step in which all the prompts decode; `steps` of them are measured, after two that are not."""
    sampling = Sampling(max_new_tokens=steps + 8, ignore_eos=True)
    sequences = [engine.submit(Request(prompt, sampling)) for prompt in prompts]
    while not all(len(sequence.output) >= 3 for sequence in sequences):
        engine.step()
    started = time.process_time()
    for _ in range(steps):
        engine.step()
    used = time.process_time() - started
    if any(sequence.finished for sequence in sequences):
        raise SystemExit("a request ended while it was measured")
    engine.close()
    return used / steps


def seconds_of_products(model: torch.nn.Module, rows: int) -> float:
    """CPU seconds of the matrix products of a step with so many rows."""
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {width: torch.randn(rows, width, dtype=linear[0].weight.dtype) for width in {one.in_features for one in linear}}
    with torch.inference_mode():
        started = time.process_time()
        for one in linear:
            torch.nn.functional.linear(inputs[one.in_features], one.weight)
        return time.process_time() - started


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--dtype", default="float32")
    options.add_argument("--page-size", type=int, default=256)
    options.add_argument("--requests", type=int, default=4)
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--threads", type=int, default=1, help="of torch")
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    model, tokenizer = load_model(str(smollm2_path()), given.dtype, "cpu")
    settings = {"attn": {"page_size": given.page_size}, "kvc2": {"cpu_memory_size_GB": "200MiB", "gpu_memory_size_GB": "400MiB"}}
    with PrefixCache.open(model, settings, say=None) as cache:
        engine = Engine(model, tokenizer, cache, max_batch_size=given.requests)
        text = make_prompts(tokenizer, given.page_size, cache.chunk)
        prefix = list(text.tokens[0][: text.boundary])
        prompts = [prefix + text.other(40 * number, 16) for number in range(given.requests)]
        for prompt in (prefix, *prompts):
            engine.generate([prompt], max_new_tokens=1)
        one, several, products = [], [], []
        for _ in range(given.rounds):
            one.append(seconds_per_step(engine, prompts[:1], given.steps))
            several.append(seconds_per_step(engine, prompts, given.steps))
            products.append([seconds_of_products(model, rows) for rows in (1, given.requests)])
    product_one, product_several = (statistics.median(column) for column in zip(*products, strict=True))
    ratio = statistics.median(several) / statistics.median(one)
    row = {
        "case": "decode",
        "requests": given.requests,
        "prefix_tokens": len(prefix),
        "page_size": given.page_size,
        "dtype": given.dtype,
        "one_ms": round(statistics.median(one) * 1e3, 2),
        "one_spread_ms": [round(min(one) * 1e3, 2), round(max(one) * 1e3, 2)],
        "several_ms": round(statistics.median(several) * 1e3, 2),
        "several_spread_ms": [round(min(several) * 1e3, 2), round(max(several) * 1e3, 2)],
        "ratio": round(ratio, 3),
        "products_ms": [round(product_one * 1e3, 2), round(product_several * 1e3, 2)],
        "products_ratio": round(product_several / product_one, 3),
        "load_average": os.getloadavg()[0],
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__},
    }
    print(json.dumps({"rows": [row]}) if given.json else "\n".join(f"{name:16} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
