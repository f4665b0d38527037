"""Benchmarks: `python -m tests.bench` measures the agent's speed, CPU and memory in network namespaces; needs root."""
