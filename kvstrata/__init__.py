"""A prefix cache for LLM inference that keeps KV states in GPU memory, CPU memory and on disk.

The names below are loaded on first use, so that `import kvstrata` costs nothing and works without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvstrata.cache import CacheFull, Lease, PagesLost, PrefixCache
    from kvstrata.config import Settings
    from kvstrata.identity import Identity
    from kvstrata.layout import PageLayout

_HOME = {
    "CacheFull": "cache",
    "Identity": "identity",
    "Lease": "cache",
    "PageLayout": "layout",
    "PagesLost": "cache",
    "PrefixCache": "cache",
    "Settings": "config",
}

__all__ = ["CacheFull", "Identity", "Lease", "PageLayout", "PagesLost", "PrefixCache", "Settings", "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
