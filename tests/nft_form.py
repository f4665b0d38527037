"""The table of nftables that kube-proxy 1.36 writes for objects, as `nft -j list table` prints it.

It has what the generated cluster needs: IPv4, no session affinity in sets of clients, and no source ranges. The fixed part
is that of a recorded case.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from pykubeproxy.objects import Family
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.endpoints import ResolvedEndpoint
from pykubeproxy.services.selection import ResolvedPort, resolve_ports
from tests.cases import NFT_FOLDER

Item: TypeAlias = dict[str, Any]

TABLE = "kube-proxy"
_PLACE = {"family": "ip", "table": TABLE}
_MARK: Item = {"meta": {"key": "mark"}}
_MASQUERADE: Item = {"mangle": {"key": _MARK, "value": {"|": [_MARK, 0x4000]}}}
_FROM_POD: Item = {"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "saddr"}}, "right": {"prefix": {"addr": "10.244.0.0", "len": 16}}}}  # fmt: skip
_FROM_NODE: Item = {
    "match": {"op": "==", "left": {"fib": {"result": "type", "flags": ["saddr"]}}, "right": "local"}
}
_TCP: Item = {"match": {"op": "==", "left": {"meta": {"key": "l4proto"}}, "right": "tcp"}}


def nft_table(cluster: Cluster, context: RuleContext) -> str:
    """Return the table of a node that follows these objects."""
    made = _Made(context.options.node_ip)
    for service in cluster.services():
        for resolved in resolve_ports(cluster, service.key, Family.IPV4, context.node):
            made.add(resolved)
    recorded = json.loads((NFT_FOLDER / "lb-local-none.json").read_text())["ipv4"]["nftables"]
    return json.dumps({"nftables": [*made.fixed(recorded), *made.chains, *made.rules]})


class _Made:
    """Chains, rules, and the elements of each set and map."""

    def __init__(self, node_ip: str) -> None:
        self.chains: list[Item] = []
        self.rules: list[Item] = []
        self._elements: dict[str, list[Any]] = {
            name: []
            for name in (
                "hairpin-connections",
                "cluster-ips",
                "no-endpoint-services",
                "no-endpoint-nodeports",
                "service-ips",
                "service-nodeports",
            )
        }
        self._elements["nodeport-ips"] = [node_ip]
        self._hairpins: dict[str, None] = {}

    def fixed(self, recorded: Sequence[Item]) -> Iterator[Item]:
        """Yield what does not depend on Services, with the elements of this node."""
        for item in recorded:
            ((kind, value),) = item.items()
            if kind in ("set", "map"):
                elements = self._elements.get(value["name"], [])
                rest = {key: one for key, one in value.items() if key != "elem"}
                yield {kind: {**rest, **({"elem": elements} if elements else {})}}
            elif "/" not in value.get("chain", value.get("name", "")):
                yield item

    def add(self, resolved: ResolvedPort) -> None:
        port, selection = resolved.port, resolved.selection
        name = f"{port.name.namespace}/{port.name.service}/tcp/{port.name.port}"
        hashed = base64.b32encode(hashlib.sha256(name.encode()).digest()).decode()[:8]
        service, local, external = (f"{kind}-{hashed}-{name}" for kind in ("service", "local", "external"))
        self._elements["cluster-ips"].append(port.cluster_ip)
        self._lead("service-ips", [port.cluster_ip, "tcp", port.port], service)
        self._balance(service, selection.cluster)
        for endpoint in selection.reachable:
            address = endpoint.target.rpartition(":")[0]
            if endpoint.local and endpoint.target not in self._hairpins:
                self._hairpins[endpoint.target] = None
                self._elements["hairpin-connections"].append(
                    {"concat": [address, address, "tcp", endpoint.port]}
                )
        if not port.node_port:
            return
        for address in port.load_balancer_ips:
            self._lead("service-ips", [address, "tcp", port.port], external)
        self._lead("service-nodeports", ["tcp", port.node_port], external)
        if not port.external_local:
            self._chain(external, [_MASQUERADE], [{"goto": {"target": service}}])
            return
        to_service: Item = {"goto": {"target": service}}
        ways: list[list[Item]] = [
            [_FROM_POD, to_service],
            [_FROM_NODE, _MASQUERADE],
            [_FROM_NODE, to_service],
        ]
        if selection.local:
            self._balance(local, selection.local)
            self._chain(external, *ways, [{"goto": {"target": local}}])
            return
        self._chain(external, *ways)
        for address in port.load_balancer_ips:
            self._drop("no-endpoint-services", [address, "tcp", port.port])
        self._drop("no-endpoint-nodeports", ["tcp", port.node_port])

    def _lead(self, map_: str, key: list[Any], chain: str) -> None:
        self._elements[map_].append([{"concat": key}, {"goto": {"target": chain}}])

    def _drop(self, map_: str, key: list[Any]) -> None:
        self._elements[map_].append(
            [{"elem": {"val": {"concat": key}, "comment": "dropped"}}, {"drop": None}]
        )

    def _balance(self, chain: str, endpoints: Sequence[ResolvedEndpoint]) -> None:
        targets = [
            [number, {"concat": [one.target.rpartition(":")[0], one.port]}]
            for number, one in enumerate(endpoints)
        ]
        key = {"numgen": {"mode": "random", "mod": len(targets), "offset": 0}}
        self._chain(
            chain, [_TCP, {"dnat": {"family": "ip", "addr": {"map": {"key": key, "data": {"set": targets}}}}}]
        )

    def _chain(self, name: str, *rules: list[Item]) -> None:
        self.chains.append({"chain": {**_PLACE, "name": name}})
        self.rules += ({"rule": {**_PLACE, "chain": name, "expr": rule}} for rule in rules)
