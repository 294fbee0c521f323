"""Our counters on vLLM's ways: its periodic log line, and its /metrics page. Pages are counted in pages."""

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

__all__ = ["Metrics", "Stats", "StatsTaker"]

TIERS = ("cpu", "disk")
EVERY = 1.0  # seconds between two looks

BY_TIER = {  # counters with a label for the tier
    "looked_up": "Pages that lookups found there.",
    "loaded": "Of the pages found there, those that were in the slab in time.",
    "used": "Of the pages loaded from there, those that vLLM's requests continued from.",
    "stored": "Copies of pages that became findable there.",
    "evicted": "Copies of pages that were dropped there to make room.",
    "failures": "Moves of pages into the tier that failed.",
}
IN_TOTAL = {
    "missed_pages": "Full pages of requests that were in no tier.",
    "corrupt": "Pages on disk whose content was not what it should be: dropped.",
    "unreadable": "Pages on disk that could not be read: left alone for a while.",
    "timeouts": "Moves that took longer than their deadline.",
    "copy_failures": "Copies between the slab and vLLM's blocks that failed.",
    "saves_dropped": "Pages that were not saved: the slab had no room.",
    "spills_dropped": "Pages that were not written to disk: it was full, ill or too slow.",
}
NOW = {"pages": "Pages that can be found in the tier.", "bytes": "Bytes that the tier takes.", "healthy": "1, or 0 for trouble."}


class Stats(KVConnectorStats):
    """What happened since the last look: `data["counters"]`, added up, and how things are: `data["now"]`; names are "tier.name"."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        """This one with what came later."""
        counters = dict(self.data.get("counters", {}))
        for name, count in other.data.get("counters", {}).items():
            counters[name] = counters.get(name, 0) + count
        self.data = {"counters": counters, "now": other.data.get("now") or self.data.get("now", {})}
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log: what is not zero."""
        counters = {name: count for name, count in self.data.get("counters", {}).items() if count}
        return counters | {name: value for name, value in self.data.get("now", {}).items() if name.endswith(".pages")}

    def is_empty(self) -> bool:
        return not self.data


class StatsTaker:
    """Looks at the cache's counters once a second at most. `read`: PrefixCache.stats."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read
        self._before: dict[str, int] = {}
        self._next = 0.0

    def take(self, now: float) -> Stats | None:
        """None between two looks, and when nothing happened since the last one."""
        if now < self._next:
            return None
        self._next = now + EVERY
        found = self._read()
        counters = {f"{tier}.{name}": found[tier][name] for tier in TIERS for name in BY_TIER}
        counters |= {name: found[name] for name in IN_TOTAL}
        changes = {name: count - self._before.get(name, 0) for name, count in counters.items()}
        if self._before and not any(changes.values()):
            return None
        self._before = counters
        disk = found["disk"]
        state = {
            "cpu.pages": found["cpu"]["pages"],
            "disk.pages": disk["pages"] + disk["shared"],
            "disk.bytes": found["disk_bytes"],
            "disk.healthy": int(disk.get("health", "ok") == "ok"),
        }
        return Stats({"counters": changes, "now": state})


class Metrics(KVConnectorPromMetrics):
    """kvstrata:<counter>_total{tier=...}, and gauges."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        with_tier = [*labelnames, "tier"]
        self._counters = {
            name: self._counter_cls(name=f"kvstrata:{name}", documentation=text, labelnames=with_tier)
            for name, text in BY_TIER.items()
        }
        self._totals = {
            name: self._counter_cls(name=f"kvstrata:{name}", documentation=text, labelnames=labelnames)
            for name, text in IN_TOTAL.items()
        }
        self._gauges = {
            name: self._gauge_cls(name=f"kvstrata:{name}", documentation=text, labelnames=with_tier) for name, text in NOW.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.get("counters", {}).items():
            tier, _, counter = name.rpartition(".")
            metric = self._counters[counter].labels(*labels, tier) if tier else self._totals[counter].labels(*labels)
            metric.inc(count)
        for name, value in transfer_stats_data.get("now", {}).items():
            tier, _, gauge = name.rpartition(".")
            self._gauges[gauge].labels(*labels, tier).set(value)
