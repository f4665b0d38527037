"""Benchmarks: `python -m tests.bench` as root measures what the agent costs, in network namespaces of its own."""
