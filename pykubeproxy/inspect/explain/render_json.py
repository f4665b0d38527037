"""The JSON document of `pykubeproxy explain`."""

import enum
from collections.abc import Iterator, Sequence

import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.explain.model import (
    Difference,
    EndpointExplanation,
    Explanation,
    PolicyExplanation,
    PortExplanation,
    all_ports,
    differences,
)
from pykubeproxy.inspect.explain.render_text import (
    endpoint_reason,
    ignored_hints_message,
    notes,
    summary,
)
from pykubeproxy.inspect.render_json import port_entry, rounded
from pykubeproxy.objects import Endpoint, Service
from pykubeproxy.services.selection import IgnoredHints, NodeTopology, Reason, TopologyMode
from pykubeproxy.wording import untied


def document(
    explanations: Sequence[Explanation],
    node: NodeTopology,
    compared: tuple[Sequence[Explanation], NodeTopology] | None = None,
) -> dict[str, object]:
    """The explanations as a JSON document of version pykubeproxy/v1.

    {"apiVersion", "node": {"name", "zone"},
     "services": [{"namespace", "name", "port", "protocol", "family",
      "policies": [{"policy", "verdict": "dnat", "reject" or "drop", "chain": the balancing chain or null,
        "frontends": [{"kind", "address", "port"}],
        "fromThisNode": frontends that lead here only for packets of this node and its pods,
        "endpoints": [{"address", "port", "node", "zone", "pod", "share": 0 to 1, "used": bool,
          "reason": such as "not-ready", "message": the same as a phrase}]}],
      "topology": "all", "same node", "same zone", or null if hints do not apply,
      "ignoredHints": [{"kind": "node" or "zone", "value": this node's name or zone,
        "endpointsWithout": ["address:port"], "message"}],
      "skipped": [{"slice", "address": null for the whole slice or port, "reason", "message"}],
      "affinitySeconds": or null, "sourceRanges": [CIDR] or null for all, "healthCheckNodePort": or null,
      "quarantined": true if it is not served, in quarantine,
      "notes": [sentence]}],
     "skippedServices": [{"namespace", "name", "family", "reason", "message"}],
     "skippedValues": [{"namespace", "name", "field", "value", "port": or null for all ports, "message"}],
     "differences": null or {"node": {"name", "zone"}, "endpoints": [{"namespace", "name", "portName", "protocol",
      "family", "policy", "address", "port", "used", "reason", "message"}]}}

    "services" has one entry for each service port and family. "skippedValues" lists invalid values of the Services, and
    addresses that the agent does not serve at this port, because it needs them itself. With --node or --zone,
    "differences" lists the endpoints that only one of the two nodes uses, with the reasons on this node. Keys may be
    added.
    """
    return {
        "apiVersion": API_VERSION,
        "node": _node(node),
        "services": [_port(port) for port in all_ports(explanations)],
        "skippedServices": [
            {**_service(explanation.service), "family": family.value, **reason_entry(reason, reason.value)}
            for explanation in explanations
            for family, reason in explanation.skipped.items()
        ],
        "skippedValues": [entry for explanation in explanations for entry in _skipped_values(explanation)],
        "differences": compared
        and {
            "node": _node(compared[1]),
            "endpoints": [_difference(one) for one in differences(compared[0], explanations)],
        },
    }


def _skipped_values(explanation: Explanation) -> Iterator[dict[str, object]]:
    service = explanation.service
    skipped: list[tuple[str, str | int, int | None, str]] = [
        (rejected.field, rejected.value, None, rejected.reason) for rejected in service.rejected
    ]
    for port in (it.port for it in explanation.ports):
        for ip, reason in port.skipped_ips:
            field = "spec.externalIPs" if ip in service.external_ips else "status.loadBalancer.ingress"
            skipped.append((field, ip, port.port, reason.value))
    for field, value, number, message in skipped:
        entry = {"field": field, "value": value, "port": number, "message": message}
        yield {**_service(service), **entry}


def _service(service: Service) -> dict[str, object]:
    return {"namespace": service.namespace, "name": service.name}


def _node(node: NodeTopology) -> dict[str, object]:
    return {"name": node.node_name, "zone": node.zone}


def _port(explanation: PortExplanation) -> dict[str, object]:
    port = explanation.port
    return {
        **port_entry(port.name),
        "family": explanation.family.value,
        "policies": [_policy(policy) for policy in explanation.policies],
        "topology": explanation.topology.value if explanation.topology else None,
        "ignoredHints": [_ignored_hints(ignored) for ignored in explanation.ignored_hints],
        "skipped": [
            {
                "slice": skipped.slice_name,
                "address": skipped.address or None,
                **reason_entry(skipped.reason, skipped.reason.value),
            }
            for skipped in explanation.skipped
        ],
        "affinitySeconds": port.affinity_seconds,
        "sourceRanges": port.source_ranges,
        "healthCheckNodePort": port.health_check_node_port or None,
        "quarantined": bool(explanation.quarantined),
        "notes": [untied(note) for note in (*summary(explanation), *notes(explanation))],
    }


def _policy(policy: PolicyExplanation) -> dict[str, object]:
    return {
        "policy": policy.policy.value,
        "verdict": policy.verdict.value,
        "chain": policy.chain or None,
        "frontends": msgspec.to_builtins(policy.frontends),
        "fromThisNode": msgspec.to_builtins(policy.from_this_node),
        "endpoints": [endpoint_entry(one) for one in policy.endpoints],
    }


def endpoint_entry(one: EndpointExplanation) -> dict[str, object]:
    """Return the keys of an endpoint under a policy."""
    endpoint = one.resolved.endpoint
    return {
        "address": endpoint.address,
        "port": one.resolved.port,
        "node": endpoint.node_name,
        "zone": endpoint.zone,
        "pod": endpoint.pod,
        "share": rounded(one.share),
        **_endpoint_reason(one.reason, endpoint),
    }


def _difference(difference: Difference) -> dict[str, object]:
    entry = {
        "portName" if key == "port" else key: value for key, value in port_entry(difference.name).items()
    }
    return {
        **entry,
        "family": difference.family.value,
        "policy": difference.policy.value,
        "address": difference.resolved.endpoint.address,
        "port": difference.resolved.port,
        **_endpoint_reason(difference.here, difference.resolved.endpoint),
    }


def _endpoint_reason(reason: Reason, endpoint: Endpoint) -> dict[str, object]:
    return {"used": reason.used, **reason_entry(reason, endpoint_reason(reason, endpoint))}


def _ignored_hints(ignored: IgnoredHints) -> dict[str, object]:
    return {
        "kind": "node" if ignored.mode is TopologyMode.SAME_NODE else "zone",
        "value": ignored.domain,
        "endpointsWithout": list(ignored.unhinted),
        "message": ignored_hints_message(ignored),
    }


def reason_entry(reason: enum.Enum, message: str) -> dict[str, object]:
    """A stable word for programs, and the same for people."""
    return {"reason": reason.name.lower().replace("_", "-"), "message": message}
