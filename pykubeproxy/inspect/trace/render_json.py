"""The JSON document of `pykubeproxy trace`."""

import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.render_json import rounded
from pykubeproxy.inspect.trace.model import Trace


def document(trace: Trace) -> dict[str, object]:
    """The trace as a JSON document of version pykubeproxy/v1.

    {"apiVersion": "pykubeproxy/v1",
     "packet": {"protocol": "TCP"|"UDP"|"SCTP", "source", "destination", "port",
                "from": "node" if it starts on this node, else "network", "interface": it comes in by, or ""},
     "verdict": "dnat"|"reject"|"drop"|"pass", "masquerade": true if its source is replaced for every endpoint,
     "endpoints": [{"address", "port", "probability": 0 to 1, "masquerade": true if its source is replaced for this
                    endpoint}],
     "rejections": [{"verdict": "reject"|"drop", "probability", "table", "chain", "rule"}],
     "steps": [{"table", "chain", "rule", "matched": true or false, "reason": a phrase}]}

    Under "dnat" the probabilities of endpoints and rejections add up to 1. A rule is the text that iptables-save prints
    after "-A CHAIN ", or "policy DROP". Steps are in the order of the path, alternatives one after the other; rules for
    other destinations, ports and protocols are left out. Keys may be added.
    """
    packet = trace.packet
    return {
        "apiVersion": API_VERSION,
        "packet": {
            "protocol": packet.protocol.upper(),
            "source": packet.source,
            "destination": packet.destination,
            "port": packet.port,
            "from": "node" if packet.starts_here else "network",
            "interface": packet.received_by,
        },
        "verdict": trace.verdict.value,
        "masquerade": trace.masquerade,
        "endpoints": [
            {**msgspec.to_builtins(endpoint), "probability": rounded(endpoint.probability)}
            for endpoint in trace.endpoints
        ],
        "rejections": [
            {
                "verdict": rejection.verdict.value,
                "probability": rounded(rejection.probability),
                "table": rejection.step.table,
                "chain": rejection.step.chain,
                "rule": rejection.step.rule,
            }
            for rejection in trace.rejections
        ],
        "steps": msgspec.to_builtins(trace.steps),
    }
