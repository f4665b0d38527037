"""A generated cluster with many nodes, and the tables of each node as iptables-save prints them.

Of every ten nodes, five run an old kube-proxy, one has stopped following the objects, and one runs in IPVS mode.
"""

import enum
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from pykubeproxy.config import Dispatch
from pykubeproxy.inspect.node import NodeRules, NodeState, Origin
from pykubeproxy.inspect.packets.packet import NodeNetwork
from pykubeproxy.objects import Family, Kind, Listed, Node, decode
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.dispatch import node_port_jumps
from pykubeproxy.rules.options import LocalTraffic, RuleOptions
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.selection import NodeTopology
from tests.fakes.cluster import service, slice_of
from tests.older_forms import Form, rules_in_form

_POD_NETWORK = {Family.IPV4: "10.244.0.0/16", Family.IPV6: "fd00:10:244::/48"}
_FORMS = (Form.V1_22, Form.V1_36, Form.V1_25, Form.V1_30)


class NodeKind(enum.Enum):
    """What a node does."""

    FOLLOWS = "follows"
    STALE = "stale"
    IPVS = "ipvs"


class Size(NamedTuple):
    """The number of nodes, of Services, and of endpoints of each Service.

    With `nftables`, a third of the nodes runs kube-proxy in that mode.
    """

    nodes: int
    services: int = 200
    endpoints: int = 5
    nftables: bool = False


class FleetNode(NamedTuple):
    """A node of the generated cluster, what it does, and the version of its kube-proxy."""

    node: Node
    kind: NodeKind
    form: Form
    nftables: bool = False


def nodes(size: Size) -> list[FleetNode]:
    """Return the nodes of the cluster."""
    found = []
    for index in range(size.nodes):
        high, low = divmod(index, 250)
        node = Node(
            f"node{index}",
            addresses=(f"192.168.{high}.{low + 1}",),
            pod_cidrs=(f"10.244.{index % 256}.0/24",),
            zone=f"zone{index % 3}",
        )
        kind = {3: NodeKind.STALE, 7: NodeKind.IPVS}.get(index % 10, NodeKind.FOLLOWS)
        mode = size.nftables and index % 3 == 0 and kind is not NodeKind.IPVS
        found.append(FleetNode(node, kind, Form.V1_36 if mode else _FORMS[index % 4], mode))
    return found


def cluster(size: Size, changed: frozenset[int] = frozenset()) -> Cluster:
    """Return the objects. The Services with the numbers in `changed` have one endpoint less than they are to have."""
    found = Cluster()
    made = [*objects(size, changed)]
    for kind in (Kind.SERVICE, Kind.ENDPOINT_SLICE):
        decoded = (decode(kind, msgspec.json.encode(entry)) for entry in made if entry["kind"] == kind.value)
        found.apply(Listed(kind, tuple(decoded)))
    found.apply(Listed(Kind.NODE, tuple(one.node for one in nodes(size))))
    return found


def objects(size: Size, changed: frozenset[int] = frozenset()) -> Iterator[dict[str, Any]]:
    """Yield the Services and their slices: one in ten with a node port, one in twenty of type LoadBalancer."""
    for index in range(size.services):
        name, ip = f"service{index}", f"10.96.{index // 250}.{index % 250 + 1}"
        port: dict[str, Any] = {"name": "http", "protocol": "TCP", "port": 80}
        spec: dict[str, Any] = {"type": "ClusterIP", "clusterIP": ip, "clusterIPs": [ip]}
        ingress = []
        if index % 10 == 0:
            port["nodePort"], spec["type"] = 30000 + index, "NodePort"
        if index % 20 == 0:
            spec["type"], ingress = "LoadBalancer", [{"ip": f"203.0.113.{index // 20 % 250 + 1}"}]
        if index % 40 == 0:
            spec["externalTrafficPolicy"] = "Local"
        # The tables of nftables are made without the sets of clients.
        if index % 25 == 0 and not size.nftables:
            timeout = {"timeoutSeconds": 10800}
            spec |= {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": timeout}}
        yield service(name, **spec, ports=[port]) | {"status": {"loadBalancer": {"ingress": ingress}}}
        numbers = [(index + 7 * n, index % 200 + 2) for n in range(size.endpoints - (index in changed))]
        made = slice_of(name, *(f"10.244.{number % 256}.{last}" for number, last in numbers))
        for endpoint, (number, _) in zip(made["endpoints"], numbers, strict=True):
            endpoint["nodeName"] = f"node{number % size.nodes}"
        made["metadata"]["name"] = f"{name}-a"
        yield made | {"ports": [{"name": "http", "protocol": "TCP", "port": 8080}]}


def context(node: Node, family: Family = Family.IPV4) -> RuleContext:
    """Return what the rules of a node depend on besides the objects."""
    options = RuleOptions(
        family=family,
        local_traffic=LocalTraffic(source=_POD_NETWORK[family]),
        node_ip=node.addresses[0],
        dispatch=Dispatch.FLAT,
    )
    jumps = node_port_jumps((), (), options)
    return RuleContext(NodeTopology(node.name, node.zone), options, jumps)


def tables(one: FleetNode, objects: Cluster) -> dict[Family, Ruleset]:
    """Return the tables of a node that follows these objects."""
    return {family: rules_in_form(one.form, objects, context(one.node, family)) for family in Family}


def saved(rules: Ruleset) -> str:
    """Return the output of iptables-save or ip6tables-save, with counters."""
    program = "ip6tables-save" if rules.family is Family.IPV6 else "iptables-save"
    return "".join(f"{line}\n" for line in _saved(rules, program))


def _saved(rules: Ruleset, program: str) -> Iterator[str]:
    for table in rules.tables():
        yield f"# Generated by {program} v1.8.9 (nf_tables) on Sun Nov 22 12:00:00 2026"
        yield f"*{table}"
        yield from (f":{chain} - [0:0]" for chain, _ in rules.of_table(table))
        yield from (f"[12:720] -A {chain} {it}" for chain, some in rules.of_table(table) for it in some)
        yield "COMMIT"
        yield "# Completed on Sun Nov 22 12:00:00 2026"


def state_of(node: Node, rulesets: Mapping[Family, Ruleset], proxy: str = "", pod: str = "") -> NodeState:
    """Return the state of a node of a cluster."""
    rules = {family: NodeRules(ruleset) for family, ruleset in rulesets.items()}
    network = NodeNetwork(frozenset(node.addresses))
    return NodeState(node, Origin(f"rules of node {node.name}", "", proxy, pod), rules, network)
