"""Rulesets as a document for programs."""

from collections.abc import Iterable

from pykubeproxy import API_VERSION
from pykubeproxy.rules.ruleset import ChainKey, Ruleset


def document(rulesets: Iterable[Ruleset], node_name: str) -> dict[str, object]:
    """The rules for a node as a document for JSON, of version pykubeproxy/v1.

    {"apiVersion", "node": its name, "families": [{"family",
      "tables": [{"table", "chains": [{"chain", "rules": [as iptables-save prints them after "-A CHAIN "]}]}]}]}

    Tables and chains stand in the order of writing; jumps from the kernel's own chains are among the rules. Keys may be
    added.
    """
    return {
        "apiVersion": API_VERSION,
        "node": node_name,
        "families": [
            {
                "family": ruleset.family.value,
                "tables": [
                    {
                        "table": table,
                        "chains": [
                            {"chain": chain, "rules": list(rules)} for chain, rules in ruleset.of_table(table)
                        ],
                    }
                    for table in ruleset.tables()
                ],
            }
            for ruleset in rulesets
        ],
    }


def chain_entry(key: ChainKey) -> dict[str, object]:
    """A chain's place, as documents name it."""
    return {"table": key.table, "chain": key.chain}
