"""Readers of what comes from outside, fed with what nobody meant them to read. `python -m tests.fuzz --help`."""
