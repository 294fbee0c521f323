"""Small caches and engines for the engine's tests."""

from engine_fixtures import make_cache, make_engine, one_thread

__all__ = ["make_cache", "make_engine", "one_thread"]
