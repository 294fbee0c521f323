"""Connectors: one room per engine that keeps its own device pool; nothing else knows that engine."""
