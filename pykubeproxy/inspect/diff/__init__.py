"""What `diff` answers: how the rules of 1 to n nodes differ from desired ones, by rules or by meaning."""
