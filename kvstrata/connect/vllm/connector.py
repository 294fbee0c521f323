"""The class that vLLM makes two kinds of: one beside its scheduler, one in every worker. It only hands on; see scheduler.py,
worker.py."""

import difflib
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import kvstrata
from kvstrata import capacity
from kvstrata.cache import PrefixCache
from kvstrata.config import Settings
from kvstrata.connect.vllm.blocks import BlockLayout
from kvstrata.connect.vllm.events import EventWriter
from kvstrata.connect.vllm.identity import identity_of, model_tag
from kvstrata.connect.vllm.plan import Plan, SharedSlab
from kvstrata.connect.vllm.plugin import check_version
from kvstrata.connect.vllm.scheduler import Scheduler
from kvstrata.connect.vllm.stats import Metrics, Stats
from kvstrata.connect.vllm.worker import Handshake, Worker
from kvstrata.opening import limits_of

__all__ = ["KVStrataConnector"]

log = logging.getLogger("kvstrata")
OPTIONS = {"config": None, "save_generated": True, "allow_untested_vllm": False}  # of kv_connector_extra_config


class KVStrataConnector(KVConnectorBase_V1, SupportsHMA):
    """CPU memory and disk behind vLLM's block pool.

    `kv_connector_extra_config`: `config`, the path of a config.yaml or its content as a mapping; `save_generated` (true), whether
    pages with generated tokens are kept; `allow_untested_vllm` (false). Raises one sentence where this vLLM, model or config cannot
    be used.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        from vllm import __version__

        options = _options(self._kv_transfer_config.kv_connector_extra_config)
        check_version(__version__, options["allow_untested_vllm"])
        if self._kv_transfer_config.kv_role != "kv_both":
            raise ValueError(f"kv_role is {self._kv_transfer_config.kv_role!r}, but a cache reads and writes: set it to 'kv_both'")
        self._options = options
        self._settings = Settings.load(options["config"])
        chosen = self._settings.origin("attn.page_size") != "default"
        self._blocks = BlockLayout.of(vllm_config, kv_cache_config, self._settings.attn.page_size, chosen)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if role == KVConnectorRole.WORKER:
            rank = vllm_config.parallel_config.rank % self._blocks.ranks
            self._worker = Worker(vllm_config, self._blocks, kv_cache_config.num_blocks, rank)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a later miss, and nothing else."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Layer by layer, each block one contiguous range of bytes."""
        return "LBHNC"

    # --- both roles

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """The workers' word on how their blocks look inside: only now it is known which pages are equal, so the cache is opened."""
        layouts = sorted({one.layout for one in metadata.values()})
        if len(layouts) != 1:
            raise ValueError(
                f"the workers lay out their KV caches differently, so their pages cannot be shared: {'; '.join(layouts)}"
            )
        self._open(layouts[0])

    def _open(self, worker_layout: str) -> Scheduler:
        if self._scheduler is not None:
            raise RuntimeError("the workers' layouts came after requests: start the engine again")
        page_size = self._blocks.page_size
        settings = self._settings.model_copy(update={"attn": self._settings.attn.model_copy(update={"page_size": page_size})})
        tag = model_tag(self._vllm_config, self._blocks, worker_layout)
        layout = self._blocks.page_layout(tag)
        found = capacity.resolve(settings, layout, guest=True)
        for line in found.banner(self._blocks.ranks, self._blocks.slices):
            log.info("%s", line)
        identity = identity_of(self._vllm_config, layout) if found.disk else None
        cache = PrefixCache(layout, limits_of(found), identity=identity, shared_slab=True)
        log.info("kvstrata %s for vLLM, pages of %d blocks", kvstrata.__version__, self._blocks.blocks_per_page)
        place = cache.slab
        slab = SharedSlab(os.getpid(), place.fd, place.address, place.rows, place.stride, tag)
        wanted = self._vllm_config.kv_events_config
        events = EventWriter(page_size, self._blocks.block_size) if wanted is not None and wanted.enable_kv_cache_events else None
        self._scheduler = Scheduler(cache, self._blocks, slab, save_generated=self._options["save_generated"], events=events)
        return self._scheduler

    @property
    def scheduler(self) -> Scheduler:
        """Of the scheduler's role. Without workers that said how their blocks look, pages are this process's own kind."""
        return self._scheduler if self._scheduler is not None else self._open(f"unknown {os.getpid()}")

    @property
    def worker(self) -> Worker:
        assert self._worker is not None, "a method of the worker's role was called on the scheduler's"
        return self._worker

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()

    # --- the worker's role

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> Handshake | None:
        return Handshake(self.worker.layout) if self.worker.layout else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.load(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before a request that needs them is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole pages are saved after the forward pass."""

    def wait_for_save(self) -> None:
        self.worker.save(self._plan())

    def _plan(self) -> Plan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, Plan)
        return plan

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.worker.take_loaded() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> Any:
        return self.worker.take_report()

    # --- the scheduler's role

    def on_new_request(self, request: Any) -> None:
        self.scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self.scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.admitted(request, blocks.get_block_ids()[0] if num_external_tokens else [], num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        cpu, disk = self.scheduler.sources(request)
        return {source: count for source, count in ((CacheHitSource.HOST, cpu), (CacheHitSource.DISK, disk)) if count}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self.scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler.reported(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finished(request.request_id)
        return False, None  # what is being saved of it was read before vLLM heard that the step ended

    def reset_cache(self) -> bool | None:
        return self.scheduler.reset()

    def take_events(self) -> list[Any]:
        return self.scheduler.take_events()

    def get_kv_connector_stats(self) -> Stats | None:
        return self.scheduler.take_stats() if self._worker is None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Metrics:
        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """kv_connector_extra_config with its defaults. Raises ValueError for what is none of ours."""
    for name, value in given.items():
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"valid are {', '.join(OPTIONS)}"
            raise ValueError(f"unknown key {name!r} in kv_connector_extra_config: {hint}")
        if isinstance(OPTIONS[name], bool) and not isinstance(value, bool):
            raise ValueError(f"kv_connector_extra_config.{name} is {value!r}, but must be true or false")
    return {**OPTIONS, **given}
