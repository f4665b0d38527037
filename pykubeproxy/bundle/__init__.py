"""Bundles: one file with what tells where connections of a node go. `layout` describes the file."""
