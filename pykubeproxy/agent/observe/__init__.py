"""Observe the agent: health, metrics, events, status, sync log."""
