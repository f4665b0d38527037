"""From service ports to iptables rules: names, chains, dispatch, and the least change that leads there.

Pure: values come in, a Ruleset or the text for iptables-restore goes out.
"""
