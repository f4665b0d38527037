"""Bundles: the rules, settings and objects of a node in one file. `layout.py` lists its files."""
