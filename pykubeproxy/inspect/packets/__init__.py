"""Packets on their way through the rules of a node: who sends them, which rules they meet, and where they end.

    walked = walk([IptablesRules(ruleset)], Packet("tcp", "10.244.1.5", "10.96.0.10", 80), network, record=True)

`walk` knows the kernel's hooks, `rule_set` what it asks of rules, `IptablesRules` the tables and the text of iptables.
"""
