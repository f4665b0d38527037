"""Render service ports as iptables rules, and compute the smallest update of the tables.

Pure: values come in, a Ruleset or input for iptables-restore goes out.
"""
