"""vLLM's real scheduler, block manager and connector interface around workers that compute no model, but write for every token what
nobody else would write there: a chained digest of everything before it. What a request reads is compared token by token."""

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvstrata.connect.vllm import KVStrataConnector
from kvstrata.speed import Speed

BLOCK = 16
PAGE = 32
LAYERS = ("model.layers.0.attn", "model.layers.1.attn")
WIDTH = 16  # values of a token in a layer
VOCAB = 1000
PATIENCE = 120.0  # seconds for what takes one
init_none_hash(sha256)


def write_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A tiny Llama, weights drawn from `seed`; returns its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=4096, **{**size, **changes})
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tokens_of(count: int, seed: int = 0) -> list[int]:
    """A prompt that shares no page with one of another seed."""
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


class Rank:
    """One worker: its blocks, and the connector's role there."""

    def __init__(self, config: Any, kv: KVCacheConfig, number: int) -> None:
        self.number = number
        config.parallel_config.rank = number
        self.connector = KVStrataConnector(config, KVConnectorRole.WORKER, kv)
        self.caches = {name: torch.full((kv.num_blocks, 1, BLOCK, WIDTH), -1, dtype=torch.int32) for name in LAYERS}
        self.connector.register_kv_caches(self.caches)


class Clock:
    """Of the connector's scheduler: it stands still until the test turns it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Computing(Speed):
    """Of a model that nobody runs: so many tokens per second, whatever is measured."""

    def __init__(self, tokens_per_s: float) -> None:
        super().__init__()
        self.value = tokens_per_s

    def measured(self, units: float, seconds: float, at_least: bool = False) -> None:
        pass


class Sim:
    """An engine. `prefill`: tokens per second that it takes computing to have; `wrong`: what a request read and should not have."""

    def __init__(
        self,
        model: Path,
        *,
        blocks: int = 40,
        cpu_pages: int = 64,
        disk: Path | None = None,
        disk_pages: int = 4096,
        ranks: int = 1,
        replicas: int = 1,
        page: int = PAGE,
        prefix_caching: bool = True,
        seqs: int = 8,
        budget: int = 256,
        policy: str | None = "recompute",
        prefill: float = 1.0,
        extra: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        row = page * WIDTH * 4 * len(LAYERS) * (ranks // replicas)
        row = -(-row // 4096) * 4096
        content: dict[str, Any] = {"attn.page_size": page, "kvc2.cpu_memory_size_GB": cpu_pages * row / 1e9, "kvc2.io_threads": 2}
        content["kvc2.load_deadline_s"] = PATIENCE  # what is to come comes: only tests of deadlines set one
        if disk is not None:
            content |= {"kvc2.disk_path": str(disk), "kvc2.disk_size_GB": disk_pages * row / 1e9, "kvc2.disk_reserve_free_GB": 0}
        options = {"kv_load_failure_policy": policy} if policy else {}
        transfer = KVTransferConfig(
            kv_connector="KVStrataConnector",
            kv_role="kv_both",
            kv_connector_module_path="kvstrata.connect.vllm",
            kv_connector_extra_config={"config": {**content, **(settings or {})}, **(extra or {})},
            **options,
        )
        defaults: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "block_size": BLOCK,
            "max_model_len": min((blocks - 1) * BLOCK, 4000),
            "max_num_seqs": seqs,
            "max_num_batched_tokens": budget,
            "enforce_eager": True,
            "enable_prefix_caching": prefix_caching,
            "kv_transfer_config": transfer,
            "async_scheduling": False,
        }
        self.config = EngineArgs(**{**defaults, **engine}).create_engine_config()
        self.config.cache_config.num_gpu_blocks = blocks
        self.config.parallel_config.tensor_parallel_size = ranks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=WIDTH // 2, dtype=torch.float32)
        self.kv = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)],
            kv_tp_replicas=replicas,
        )
        self.ranks = [Rank(self.config, self.kv, number) for number in range(ranks)]
        self.replicas = replicas
        self.config.parallel_config.rank = 0
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=self.kv,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.connector: KVStrataConnector = self.scheduler.connector
        metadata = {rank.number: rank.connector.get_handshake_metadata() for rank in self.ranks}
        self.connector.set_xfer_handshake_metadata(metadata)
        self.aggregator = KVOutputAggregator.from_connector(self.connector, ranks)
        self.cache = self.connector.scheduler.cache
        self.connector.scheduler.patience.prefill = Computing(prefill)
        self.weights = 0  # raised when they change in place
        self.wrong: list[str] = []
        self.cached: dict[str, tuple[int, int]] = {}  # request -> (local, external) tokens of its first admission
        self.finished: dict[str, str] = {}  # request -> reason
        self.outputs: dict[str, list[int]] = {}
        self.preempted = 0
        self.queries = 0  # tokens that vLLM asked for beyond its own pool
        self.hits: dict[str, int] = {}  # of them, found; by source
        self._requests: dict[str, Request] = {}
        self._media: dict[str, list[Any]] = {}
        self._digests: dict[str, list[int]] = {}
        self._written_by: dict[str, int] = {}
        self._count = 0

    # --- requests

    def add(self, tokens: list[int], *, new: int = 1, salt: str | None = None, **options: Any) -> str:
        """Submits a request; its name."""
        name = f"r{self._count}"
        self._count += 1
        fields = {key: options.pop(key) for key in ("lora_request", "mm_features", "prompt_embeds", "resumable") if key in options}
        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, **options)
        request = Request(
            request_id=name,
            prompt_token_ids=None if "prompt_embeds" in fields else tokens,
            sampling_params=sampling,
            pooling_params=None,
            cache_salt=salt,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
            **fields,
        )
        self._requests[name] = request
        self._media[name] = list(request.mm_features)
        self._digests[name] = []
        self.scheduler.add_request(request)
        request.mm_features.clear()  # the tiny model has no encoder, and vLLM would wait for its output
        return name

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.finished[name] = "abort"

    def serve(self, tokens: list[int], **options: Any) -> tuple[int, int]:
        """One request from its arrival to its end: (tokens that vLLM had, tokens that came from us)."""
        name = self.add(tokens, **options)
        self.run()
        assert self.finished.get(name) == "length", self.finished.get(name)
        return self.cached[name]

    def run(self) -> None:
        """Steps until nothing is left to do."""
        self.run_until(lambda: not self.scheduler.has_unfinished_requests(), "no request is left")
        self.step()  # what ended is told to the workers

    def run_until(self, condition: Callable[[], Any], what: str) -> None:
        """Steps until it is so; without work to do, as an engine that polls."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"{what}: not within {PATIENCE} s; {self.scheduler.requests}"
            if not self.step().total_num_scheduled_tokens:
                time.sleep(0.001)

    def settle(self) -> None:
        """Nothing moves any more; what could be written to disk is there."""
        assert self.cache.flush(PATIENCE)

    # --- a step, as vLLM's model runner takes it

    def step(self) -> Any:
        output = self.scheduler.schedule()
        self.preempted += len(output.preempted_req_ids or ())
        results = [self._execute(rank, output) for rank in self.ranks]
        result = self.aggregator.aggregate(results) if len(results) > 1 else results[0]
        for outputs in self.scheduler.update_from_output(output, result).values():
            seen = outputs.scheduler_stats.connector_prefix_cache_stats if outputs.scheduler_stats else None
            if seen is not None:
                self.queries += seen.queries
                for source, count in seen.hits_by_source.items():
                    self.hits[source.value] = self.hits.get(source.value, 0) + count
            for one in outputs.outputs:
                self.outputs.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.finished[one.request_id] = str(one.finish_reason)
        return output

    def _execute(self, rank: Rank, output: Any) -> ModelRunnerOutput:
        connector, names = rank.connector, list(output.num_scheduled_tokens)
        connector.handle_preemptions(output.kv_connector_metadata)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        starts = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        starts |= dict(zip(output.scheduled_cached_reqs.req_ids, output.scheduled_cached_reqs.num_computed_tokens, strict=True))
        sampled = [self._forward(rank, name, starts[name], output.num_scheduled_tokens[name]) for name in names]
        connector.start_load_kv(None)
        connector.wait_for_save()
        ended = connector.get_transfer_results(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_sending=ended.finished_sending,
            finished_recving=ended.finished_recving,
            failed_recving=ended.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=told,
        )

    def _forward(self, rank: Rank, name: str, start: int, count: int) -> list[int]:
        request, end = self._requests[name], start + count
        if start and name not in self._written_by:  # its hit, of vLLM's own and ours
            tracked = self.connector.scheduler._requests.get(name)
            local, _ = tracked.offered if tracked else (start, 0)
            self.cached.setdefault(name, (min(local, start), max(start - local, 0)))
        self.cached.setdefault(name, (0, 0))
        self._written_by[name] = self.weights
        table = np.array(self.scheduler.kv_cache_manager.get_block_ids(name)[0])
        known = self._expected(request)
        for layer, cache in enumerate(rank.caches.values()):
            values = cache.numpy()[:, 0]
            at = np.arange(end)
            blocks, within = table[at // BLOCK], at % BLOCK
            expected = self._rows(known[:end], layer, rank.number // self.replicas)
            found = values[blocks[:start], within[:start]]
            bad = np.flatnonzero((found != expected[:start]).any(axis=1))
            if len(bad):
                self.wrong.append(f"{name} rank {rank.number} layer {layer}: {len(bad)} of {start} tokens from {bad[0]} on")
            values[blocks[start:], within[start:]] = expected[start:]
        if end < request.num_tokens:
            return []
        return [known[end - 1] % VOCAB]

    def _expected(self, request: Request) -> list[int]:
        """For every known token a digest of all up to it, and of what else the states depend on."""
        known, root = self._digests[request.request_id], self._root(request)
        if known and known[0] != root:
            known.clear()
        if not known:
            known.append(root)
        for at in range(len(known) - 1, request.num_tokens):
            known.append(zlib.crc32(self._input(request, at), known[-1]))
        return known[1:]

    def _input(self, request: Request, at: int) -> bytes:
        """What the model is given at a position."""
        if request.prompt_embeds is not None and at < len(request.prompt_embeds):
            return bytes(request.prompt_embeds[at].numpy().tobytes())
        shown = [
            (item.identifier, at - item.mm_position.offset)
            for item in self._media[request.request_id]
            if 0 <= at - item.mm_position.offset < item.mm_position.length
        ]
        return repr((request._all_token_ids[at], *shown)).encode()

    def _root(self, request: Request) -> int:
        adapter = request.lora_request
        content = Path(adapter.lora_path, "adapter_model.bin").read_bytes() if adapter is not None else b""
        settings = Path(adapter.lora_path, "adapter_config.json").read_bytes() if adapter is not None else b""
        return zlib.crc32(repr((request.cache_salt, self.weights)).encode() + content + settings) | 1

    def page_bytes(self, name: str, page: int, layer: int = 0, part: int = 0) -> np.ndarray:
        """What a rank has of a layer in a page of this request, as it lies in the row."""
        known = self._expected(self._requests[name])
        size = self.cache.page_size
        return self._rows(known[page * size : (page + 1) * size], layer, part).view(np.uint8)

    @staticmethod
    def _rows(digests: list[int], layer: int, part: int) -> np.ndarray:
        rows = np.empty((len(digests), WIDTH), np.int32)
        rows[:] = np.array(digests, np.uint32).view(np.int32)[:, None]
        rows[:, -2:] = layer, part
        return rows

    # --- the end

    def close(self) -> None:
        for name in list(self.scheduler.requests):
            self.abort(name)
        self.run_until(lambda: not self.scheduler.requests, "vLLM has forgotten them")
        assert not self.wrong, self.wrong[:3]
        self.settle()
        self.cache.check_integrity()
        if self.cache.stats()["open_leases"]:  # of a probe
            self.connector.scheduler.patience.forget_probe()
        assert self.cache.stats()["open_leases"] == 0
        self.scheduler.shutdown()
