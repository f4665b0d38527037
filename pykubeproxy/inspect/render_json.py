"""The JSON document of `pykubeproxy render`, and the parts that several documents share."""

from collections.abc import Iterable

import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.frontend import Frontend
from pykubeproxy.services.ports import PortName


def document(rulesets: Iterable[Ruleset], node_name: str) -> dict[str, object]:
    """The rules for a node as a JSON document of version pykubeproxy/v1.

    {"apiVersion", "node": its name, "families": [{"family",
      "tables": [{"table", "chains": [{"chain", "rules": [as iptables-save prints them after "-A CHAIN "]}]}]}]}

    Tables and chains are in the order of writing. Jumps from built-in chains are included. Keys may be added.
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
    """A chain."""
    return {"table": key.table, "chain": key.chain}


def port_entry(name: PortName) -> dict[str, object]:
    """The name of a service port."""
    return {
        "namespace": name.namespace,
        "name": name.service,
        "port": name.port,
        "protocol": name.protocol,
    }


def frontend_entries(frontends: Iterable[Frontend]) -> list[object]:
    """Frontends."""
    return [msgspec.to_builtins(frontend) for frontend in frontends]


def rounded(probability: float) -> float:
    """Round to nine digits; iptables keeps probabilities in 31 bits."""
    return round(probability, 9)
