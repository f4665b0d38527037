"""Detect what other programs changed in our chains, and schedule checks and repairs."""
