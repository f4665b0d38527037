"""The JSON document of `pykubeproxy render`, and the parts that several documents share."""

from collections.abc import Iterable

from pykubeproxy import API_VERSION
from pykubeproxy.rules.ruleset import Ruleset
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


def port_entry(name: PortName) -> dict[str, object]:
    """Return the keys of a service port."""
    return {"namespace": name.namespace, "name": name.service, "port": name.port, "protocol": name.protocol}


def rounded(probability: float) -> float:
    """Round to nine digits; iptables keeps probabilities in 31 bits."""
    return round(probability, 9)
