"""The JSON document of `pykubeproxy dump-rules`."""

from collections.abc import Iterable

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.dump.model import ServiceView
from pykubeproxy.inspect.render_json import frontend_entries, port_entry, rounded


def document(views: Iterable[ServiceView]) -> dict[str, object]:
    """The services in the live rules as a document for JSON or YAML, of version pykubeproxy/v1.

    {"apiVersion": "pykubeproxy/v1", "services": [{
      "namespace", "name": if unknown, "" and the chain's name,
      "port": the port's name, "" if it has none, "protocol": "TCP"|"UDP"|"SCTP",
      "family": "IPv4"|"IPv6", "policy": "Cluster"|"Local",
      "verdict": "dnat", or "reject"|"drop"|"pass" without endpoints,
      "frontends": [{"kind": "cluster-ip"|"external-ip"|"load-balancer-ip"|"node-port",
                     "address": an IP, or "*" for a node port at all addresses of the node, "port": number}],
      "fromThisNode": frontends that lead here only for packets of this node and its pods,
      "endpoints": [{"address", "port", "share": 0 to 1, "packets", "bytes"}],
      "affinitySeconds": number or null, "sourceRanges": [CIDR], "healthCheckNodePort": number or null,
      "quarantined": true if it is not served because iptables rejects its rules}]}

    There is one entry for each service port, family and policy. Packets and bytes count both policies, since the
    endpoint's chain was written. Keys may be added.
    """
    return {"apiVersion": API_VERSION, "services": [_service(view) for view in views]}


def _service(view: ServiceView) -> dict[str, object]:
    return {
        **port_entry(view.name),
        "family": view.family.value,
        "policy": view.policy.value,
        "verdict": view.verdict.value,
        "frontends": frontend_entries(view.frontends),
        "fromThisNode": frontend_entries(view.from_this_node),
        "endpoints": [
            {
                "address": endpoint.address,
                "port": endpoint.port,
                "share": rounded(endpoint.share),
                "packets": endpoint.packets,
                "bytes": endpoint.bytes,
            }
            for endpoint in view.endpoints
        ],
        "affinitySeconds": view.affinity_seconds,
        "sourceRanges": list(view.source_ranges),
        "healthCheckNodePort": view.health_check_node_port or None,
        "quarantined": view.quarantined,
    }
