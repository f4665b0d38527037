"""Where objects and settings come from: an agent, a bundle, manifests or an API server."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from pykubeproxy.bundle.layout import OBJECTS
from pykubeproxy.config import Config, ConfigError, load
from pykubeproxy.inspect.node import NodeRules, NodeState, Origin, Question, ReadError
from pykubeproxy.inspect.packets.packet import NodeNetwork
from pykubeproxy.inspect.targets import ServiceFilter
from pykubeproxy.nodes import host_name
from pykubeproxy.objects import EndpointSlice, Family, Kind, Listed, Node, Service
from pykubeproxy.pages import servicez
from pykubeproxy.pages.servicez import NodeObjects
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.rules.render import installed, render
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.cluster import Cluster, rivals
from pykubeproxy.services.ports import ApiServers, PortName
from pykubeproxy.wording import listed

# Few commands need these: importing pykubeproxy.sources takes 0.1 s, the reader of bundles 0.03 s.
if TYPE_CHECKING:
    from pykubeproxy.bundle.read import Bundle
    from pykubeproxy.sources import Client
    from pykubeproxy.sources.manifests import Manifests


class NoObjects(ReadError):
    """A bundle has no objects that this version can read."""


class KnownObjects(msgspec.Struct, frozen=True):
    """Objects, the node they are asked for, and the settings of its proxy.

    - `title`: where objects and settings come from, as one side of a comparison
    - `config`: the configuration of the proxy; None if it must be inferred from rules
    - `api_servers`: addresses at which the reader, or the agent, reaches an API server
    - `quarantined`: the service ports that the agent does not serve, and why
    - `remarks`: sentences about what the objects do not show
    """

    title: str
    cluster: Cluster
    node: Node
    config: Config | None = None
    api_servers: ApiServers = frozenset()
    quarantined: Mapping[tuple[Family, PortName], str] = {}
    remarks: tuple[str, ...] = ()

    def of(self, state: NodeState) -> NodeState:
        """Return the state of a node with its Node, whose addresses count if those of its interfaces are unknown."""
        network = state.network
        if not network.addresses:
            facts = (rules.facts for rules in state.rules.values() if rules.facts)
            known = tuple(address for one in facts for address in one.addresses) or self.node.addresses
            network = msgspec.structs.replace(network, addresses=frozenset(known))
        node = self.node if self.node.name else state.node
        return msgspec.structs.replace(state, network=network, node=node)


class RenderedNode(msgspec.Struct, frozen=True):
    """A node with the rules that follow from objects and a configuration; `addresses` replace those of its Node."""

    known: KnownObjects
    config: Config
    addresses: tuple[str, ...] = ()

    def nodes(self, question: Question) -> Iterator[NodeState]:
        """Yield the node. See NodeSource."""
        cluster, node = self.known.cluster, self.known.node
        rules: dict[Family, NodeRules] = {}
        own = [*(self.addresses or node.addresses)]
        for family in question.families:
            context = context_of(self.config, node, family, self.addresses, self.known.api_servers)
            own.append(context.options.node_ip)
            rules[family] = NodeRules(installed(render(cluster, context), context.options))
        origin = Origin(self.known.title, f"for {self.known.title}", "pykubeproxy")
        yield NodeState(node, origin, rules, NodeNetwork(frozenset(own)), remarks=self.known.remarks)


def desired_rules(
    known: KnownObjects, state: NodeState, addresses: tuple[str, ...] = ()
) -> Mapping[Family, Ruleset]:
    """Return the rules that follow from objects, for each family that a node has rules of.

    If the configuration is unknown, settings are inferred from these rules. `addresses` are those of the node, if neither
    the facts about its kernel nor its Node have any.
    """
    if known.config is None:
        from pykubeproxy.inspect.diff.comparison import NodeComparison  # most commands compare nothing

        comparison = NodeComparison(known.cluster)
        proxy = state.origin.proxy
        return {family: comparison.desired(known.node, rules, proxy) for family, rules in state.rules.items()}
    found: dict[Family, Ruleset] = {}
    for family, rules in state.rules.items():
        facts = rules.facts or KernelFacts(addresses=addresses)
        facts = msgspec.structs.replace(facts, addresses=facts.addresses or known.node.addresses)
        context = rule_context(known.config, known.node.name, known.node, facts, family, known.api_servers)
        found[family] = installed(render(known.cluster, context), context.options)
    return found


def context_of(
    config: Config,
    node: Node,
    family: Family,
    addresses: tuple[str, ...] = (),
    api_servers: ApiServers = frozenset(),
) -> RuleContext:
    """Return the rule context of any node, by default with the addresses of its Node, and all kernel features."""
    facts = KernelFacts(addresses=addresses or node.addresses)
    return rule_context(config, node.name, node, facts, family, api_servers)


def cluster_of(objects: NodeObjects) -> Cluster:
    """Return the objects of an agent. Nodes other than its own are known only by the zone of their endpoints."""
    endpoints = (endpoint for slice_ in objects.slices for endpoint in slice_.endpoints)
    zones = {endpoint.node_name: endpoint.zone for endpoint in endpoints if endpoint.zone}
    nodes = {name: Node(name, zone=zone) for name, zone in zones.items()} | {objects.node.name: objects.node}
    return cluster_with(objects.services, objects.slices, tuple(nodes.values()))


def cluster_with(
    services: tuple[Service, ...], slices: tuple[EndpointSlice, ...], nodes: tuple[Node, ...]
) -> Cluster:
    """Return the cluster with these objects."""
    cluster = Cluster()
    cluster.apply(Listed(Kind.SERVICE, services))
    cluster.apply(Listed(Kind.ENDPOINT_SLICE, slices))
    cluster.apply(Listed(Kind.NODE, nodes))
    return cluster


def agent_objects(
    objects: NodeObjects,
    config: Config | None,
    title: str = "objects and configuration of the agent",
) -> KnownObjects:
    """Return the objects and the configuration of an agent."""
    quarantined = {(Family(port.family), port.port_name): port.reason for port in objects.quarantined}
    names = sorted({str(port.port_name) for port in objects.quarantined})
    node = objects.node
    return KnownObjects(
        title,
        cluster_of(objects),
        node,
        config and msgspec.structs.replace(config, hostname_override=node.name),
        objects.api_servers,
        quarantined,
        (f"the agent has quarantined {listed(names, 5)}; their rules differ.",) if names else (),
    )


def read_manifests(path: str) -> "Manifests":
    """Read objects from a file, a folder or "-". Raises ReadError."""
    from pykubeproxy.sources import SourceError
    from pykubeproxy.sources.manifests import load_manifests

    try:
        manifests = load_manifests(path)
    except SourceError as error:
        raise ReadError(str(error)) from None
    if not manifests.objects and not manifests.pods:
        name = "standard input" if path == "-" else path
        raise ReadError(
            f"{name} has no Services, EndpointSlices or Nodes; save them with"
            " `kubectl get services,endpointslices,nodes -A -o yaml`"
        )
    return manifests


def manifest_objects(path: str, manifests: "Manifests", config: Config, settings: str = "") -> KnownObjects:
    """Return the objects in files, and the node that the configuration names. Raises ReadError.

    `settings` says where the configuration comes from, "" for nowhere that matters.
    """
    cluster = Cluster()
    for event in manifests.listed():
        cluster.apply(event)
    node, remarks = _node_of(config, [object_ for object_ in manifests.objects if isinstance(object_, Node)])
    return KnownObjects(
        titled(path, settings),
        cluster,
        node,
        config,
        remarks=(*(f"{warning}." for warning in manifests.warnings), *remarks),
    )


def _node_of(config: Config, nodes: list[Node]) -> tuple[Node, tuple[str, ...]]:
    if name := config.hostname_override:
        found = next((node for node in nodes if node.name == name), None)
        if nodes and not found:
            return Node(name), (
                f"the files have no Node {name}; correct --hostname-override, or add the Node.",
            )
        return found or Node(name), ()
    if len(nodes) > 1:
        names = ", ".join(sorted(node.name for node in nodes))
        raise ReadError(f"there are several Nodes: {names}; select one with --hostname-override")
    return (nodes[0] if nodes else Node("")), ()


def server_objects(
    config: Config, settings: str = "", query: ServiceFilter | None = None, nodes: Iterable[str] = ()
) -> KnownObjects:
    """Return the objects of the configured API server: all, or at least those of a Service and these Nodes.

    The node is the one that the configuration names, else this one. Raises ReadError.
    """
    from pykubeproxy.sources import SourceError, api_watches
    from pykubeproxy.sources.queries import service_objects

    name = config.hostname_override or host_name()
    cluster = Cluster()
    try:
        client = open_client(config)
        listed = (
            service_objects(client, query.name, query.namespace, (name, *nodes))
            if query
            else (one for watch in api_watches(client, name) for one in watch.once())
        )
        for one in listed:
            cluster.apply(one)
    except SourceError as error:
        raise ReadError(f"{error}; use -f to read objects from files") from None
    node = cluster.node(name)
    missing = f"the API server has no Node {name}; use --hostname-override to select another one."
    return KnownObjects(
        titled("API server", settings),
        cluster,
        node or Node(name),
        config,
        client.server_addresses(),
        remarks=() if node else (missing,),
    )


def open_client(config: Config) -> "Client":
    """Return a client of the configured API server. Raises SourceError."""
    from pykubeproxy.sources import Client

    connection = config.client
    return Client(connection.kubeconfig, connection.master, connection.qps, connection.burst)


def bundled_agent(bundle: "Bundle") -> tuple[NodeObjects, Config | None]:
    """Return the objects in a bundle, and the configuration; None if that is unknown, as for kube-proxy.

    Raises NoObjects.
    """
    if OBJECTS not in bundle.files:
        raise NoObjects(
            f"{bundle.name} has no objects ({bundle.why_missing(OBJECTS)}); add -f PATH for objects in files, or"
            " --kubeconfig PATH for those of the API server"
        )
    try:
        document = servicez.decode(bundle.files[OBJECTS])
        config = load(document.config.encode(), {}).config if document.config else None
    except (ValueError, ConfigError) as error:
        raise NoObjects(
            f"cannot read the objects in {bundle.name}: {error}; use the pykubeproxy that made it, or add -f PATH or"
            " --kubeconfig PATH"
        ) from None
    return document.objects, config


def bundle_objects(bundle: "Bundle", query: ServiceFilter | None = None) -> KnownObjects:
    """Return the objects and the configuration in a bundle, of all Services or those that match. Raises NoObjects."""
    objects, config = bundled_agent(bundle)
    title = f"objects and configuration in {bundle.name}" if config else f"objects in {bundle.name}"
    return agent_objects(objects if query is None else _matching(objects, query), config, title)


def titled(objects: str, settings: str) -> str:
    """Name objects and where the configuration comes from, "" for nowhere that matters."""
    return f"{objects} with {settings}" if settings else objects


def _matching(objects: NodeObjects, query: ServiceFilter) -> NodeObjects:
    """Return what /servicez returns for a Service."""

    def matches(namespace: str, name: str) -> bool:
        return query.namespace in ("", namespace) and query.name in ("", name)

    services = tuple(service for service in objects.services if matches(service.namespace, service.name))
    services += rivals(services, objects.services)
    keys = {service.key for service in services}
    return msgspec.structs.replace(
        objects,
        services=services,
        slices=tuple(slice_ for slice_ in objects.slices if slice_.service_key in keys),
        quarantined=tuple(
            quarantined
            for quarantined in objects.quarantined
            if matches(quarantined.port_name.namespace, quarantined.port_name.service)
        ),
    )
