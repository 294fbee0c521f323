"""What a process of the demo is started with."""

from dataclasses import dataclass
from typing import Any

TIERS = ("gpu", "cpu", "disk")


@dataclass(frozen=True)
class Spec:
    """`config` and `overrides` are what Settings.load takes. `pages`: the keys of the text's pages in hex, once they are known."""

    model: str  # the folder
    device: str  # "auto", "cpu" or "cuda"
    dtype: str
    config: str | None
    overrides: dict[str, Any]
    own_disk: bool  # the disk tier is the demo's alone, in a temporary folder, and as large as the demo needs
    tenant: str | None  # else the pages are of a tenant of this run's, so that no earlier run has computed them
    restart: bool = False
    pages: tuple[str, ...] = ()
