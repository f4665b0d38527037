"""Measure the load of agents on the API server: `python -m tests.bench.apiserver`."""
