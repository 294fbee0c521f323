"""A real engine in a process of its own. Carries out the steps of a scenario from stdin (JSON), prints what each brought."""

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams


def main() -> None:
    options = json.loads(sys.stdin.read())
    model = LLM(**options["engine"])
    found: list[Any] = []
    for step in options["steps"]:
        if step["do"] == "reset":
            found.append(model.reset_prefix_cache())
            continue
        prompts = [{"prompt_token_ids": tokens} for tokens in step["prompts"]]
        sampling = SamplingParams(temperature=0, max_tokens=step.get("new", 8), logprobs=0, ignore_eos=True, detokenize=False)
        outputs = model.generate(prompts, sampling, use_tqdm=False)
        found.append([told(one) for one in outputs])
    sources = {
        metric.labels["source"]: metric.value
        for metric in model.get_metrics()
        if metric.name == "vllm:prompt_tokens_cached_by_source" and metric.value
    }
    print("RESULT " + json.dumps({"steps": found, "sources": sources}), flush=True)


def told(output: Any) -> dict[str, Any]:
    answer = output.outputs[0]
    tokens = list(answer.token_ids)
    return {
        "tokens": tokens,
        "logprobs": [at[token].logprob for at, token in zip(answer.logprobs or [], tokens, strict=False)],
        "cached": output.num_cached_tokens,
        "finish": answer.finish_reason,
    }


if __name__ == "__main__":
    main()
