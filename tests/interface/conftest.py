"""Small caches for models, for the interface's tests."""

from engine_fixtures import make_cache

__all__ = ["make_cache"]
