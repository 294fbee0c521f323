"""Rows of a benchmark, and the machine they were measured on."""

import importlib.metadata
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Row", "WrongData", "compare", "environment"]


class WrongData(RuntimeError):
    """What was measured did not do its work: its figures mean nothing."""


@dataclass(frozen=True)
class Row:
    """One figure. `value`, `limit`: medians, in `unit`. `ratio`: the median of value / limit of single rounds, above 1 where we are
    slower than the limit (times) or faster (rates). `spread`: the middle 90 % of values; `ratio_spread`: of ratios. None where
    there is no physical limit to compare with."""

    case: str
    value: float
    unit: str
    limit: float | None
    ratio: float | None
    spread: tuple[float, float]
    ratio_spread: tuple[float, float] | None
    rounds: int
    parameters: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """As `--json` prints it: the parameters stand beside the rest."""
        fixed = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "parameters"}
        return {name: _rounded(value) for name, value in (fixed | self.parameters).items()}


def compare(case: str, unit: str, ours: Sequence[float], limits: Sequence[float] | None = None, **parameters: Any) -> Row:
    """The row of figures taken in turns: `ours[i]` and `limits[i]` belong to one round."""
    ratios = None if limits is None else [one / limit for one, limit in zip(ours, limits, strict=True)]
    return Row(
        case,
        statistics.median(ours),
        unit,
        None if limits is None else statistics.median(limits),
        None if ratios is None else statistics.median(ratios),
        middle(ours),
        None if ratios is None else middle(ratios),
        len(ours),
        parameters,
    )


def middle(values: Sequence[float]) -> tuple[float, float]:
    """The 5th and the 95th percentile."""
    low, high = np.percentile(values, (5, 95))
    return float(low), float(high)


def environment() -> dict[str, Any]:
    """Versions, the processor, and what else is going on here."""
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    for name in ("kvstrata", "torch", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "platform": f"{sys.platform} {platform.release()} {platform.machine()}",
    }


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, tuple | list):
        return [_rounded(one) for one in value]
    return value
