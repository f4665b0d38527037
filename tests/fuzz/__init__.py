"""Hostile input for all readers, and a hostile tenant. `python -m tests.fuzz --help`, `… tests.fuzz.adversary --help`."""
