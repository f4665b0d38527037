"""Compare the effects of rules on packets, not their text: for `diff --meaning` and nodes of a cluster."""
