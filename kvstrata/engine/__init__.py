"""The embedded engine: unmodified Hugging Face causal models on the page pool. Needs torch and transformers."""

from kvstrata.engine.attention import Unsupported
from kvstrata.engine.engine import Engine
from kvstrata.engine.sampling import Sampling
from kvstrata.engine.sequence import Request, Sequence, Stats
from kvstrata.speed import worth_loading

__all__ = ["Engine", "Request", "Sampling", "Sequence", "Stats", "Unsupported", "worth_loading"]
