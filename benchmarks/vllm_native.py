"""vLLM's own tiered offloading on its CPU build, for benchmarks/vllm_tiers.py: its scheduler, CPU tier and file tier as they are,
and copies between the CPU tier and the device, which it has for GPUs only, by torch."""

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["HostTiering"]


class _Copies(OffloadingWorker):
    """Blocks of one group; a transfer is over when it was submitted."""

    def __init__(self, caches: Any, per_chunk: int, region: SharedOffloadRegion) -> None:
        self._per_chunk, self._region = per_chunk, region
        (self._refs,) = caches.group_data_refs
        self._device = [one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in caches.tensors]
        self._host = [region.create_next_worker_view(one.page_size_bytes * per_chunk) for one in caches.tensors]
        self._ended: list[TransferResult] = []

    def _copy(self, job: int, device: Any, host: Any, store: bool) -> bool:
        began, moved = time.monotonic(), 0
        first = device.block_indices[0] % self._per_chunk
        for at, block in enumerate(device.block_ids.tolist()):
            chunk, part = divmod(first + at, self._per_chunk)
            for ref in self._refs:
                own, size = self._device[ref.tensor_idx], ref.page_size_bytes
                there = self._host[ref.tensor_idx][int(host.block_ids[chunk]), part * own.shape[1] : part * own.shape[1] + size]
                here = own[block, :size]
                (there if store else here).copy_(here if store else there)
                moved += size
        self._ended.append(TransferResult(job_id=job, success=True, transfer_size=moved, transfer_time=time.monotonic() - began))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, False)

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: Any) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()


class HostTiering(TieringOffloadingSpec):
    """As vLLM's, with a worker that copies between host memories."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = _Copies(kv_caches, self.blocks_per_chunk, region)
        worker: OffloadingWorker = self._worker
        return worker
