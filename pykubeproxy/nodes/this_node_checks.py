"""Read the facts that `check` needs on this node, and return the findings."""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from msgspec.structs import replace

from pykubeproxy import kernel
from pykubeproxy.config import Config, DetectLocalMode
from pykubeproxy.inspect.check import this_node as checks
from pykubeproxy.inspect.check.migration import IPTABLES, Migration, migration, nft_version
from pykubeproxy.inspect.check.report import Check, CheckedNode, Finding, checked_node
from pykubeproxy.inspect.node import NodeState, Question, UnknownNode
from pykubeproxy.kernel import (
    Backend,
    KernelError,
    Missing,
    NotPermitted,
    features,
    leftovers,
    legacy,
    network,
    system,
)
from pykubeproxy.kernel.runner import Runner
from pykubeproxy.kernel.system import Process
from pykubeproxy.nodes import host_name
from pykubeproxy.nodes.live import LiveNode
from pykubeproxy.nodes.live_firewalls import live_firewalls
from pykubeproxy.nodes.objects import open_client
from pykubeproxy.objects import Family, Node, family_of
from pykubeproxy.rules.context import missing_network, primary_family


class CheckedConfig(NamedTuple):
    """The configuration to check for.

    - `title`: where it comes from
    - `node`: the agent's Node, if the configuration is that of the agent
    - `names_server`: it is given with the address of the API server, which the agent uses too
    """

    config: Config
    title: str
    node: Node | None = None
    names_server: bool = False


def check_this_node(wanted: CheckedConfig, node_ports: tuple[int, int]) -> CheckedNode:
    """Check this node; `node_ports` is the range of the API server. This changes nothing on the node."""
    config = wanted.config
    node_name = config.hostname_override or host_name()
    running = system.namespace_processes()
    agents = [process for process in running if checks.is_agent(process)]
    as_agent = wanted.names_server or any(map(system.shares_container, agents))
    config = _with_server(config, agents)
    found_node, server_findings = _server(config, node_name, as_agent)
    this_node = found_node or wanted.node
    backend, table_findings = _tables(config, this_node)
    findings = [
        checks.privileges(system.capabilities(), _capabilities(agents), _in_pod()),
        *table_findings,
        *_others(config, running),
        *_settings(config, this_node, node_ports),
        *server_findings,
    ]
    return checked_node(
        node_name, findings, backend=backend.value if backend else "", configuration=wanted.title
    )


def check_migration(wanted: CheckedConfig, to: str) -> CheckedNode:
    """Check what clients notice if this node changes to a mode of kube-proxy. Raises ReadError."""
    name = wanted.config.hostname_override or host_name()
    (state,) = LiveNode(wanted.config.iptables_backend.value).nodes(
        Question(addresses=True, nftables=True, firewalls=True)
    )
    known = wanted.node or _server(wanted.config, name, as_agent=False)[0] or Node(name)
    node = replace(known, kernel=os.uname().release)
    read: NodeState | UnknownNode = replace(state, node=node)
    if leftovers.has_interface() and leftovers.virtual_servers().of_kube_proxy:
        read = UnknownNode(node, "runs kube-proxy in IPVS mode", True, "ipvs")
    findings = [Check("tables").skip(remark) for remark in state.remarks]
    findings += migration(Migration(to, wanted.config.node_port_addresses), read)
    if to == IPTABLES:
        backend = kernel.choose_backend(wanted.config.iptables_backend.value)
        findings += [one for family in Family for one in _tools(wanted.config, node, backend, family)]
    else:
        printed = Runner().run(("nft", "--version"))
        findings.append(nft_version(printed.stdout))
    return checked_node(name, findings, configuration=wanted.title, migrate_to=to)


def _with_server(config: Config, agents: Iterable[Process]) -> Config:
    """Return the configuration with the API server of the agent that runs, unless it names one.

    The path of a kubeconfig counts only in the agent's container.
    """
    if config.client.kubeconfig or config.client.master:
        return config
    for agent in agents:
        client = replace(config.client, master=checks.flag_of(agent, "master"))
        if system.shares_container(agent):
            client = replace(client, kubeconfig=checks.flag_of(agent, "kubeconfig"))
        if client.master or client.kubeconfig:
            return replace(config, client=client)
    return config


def _capabilities(agents: Iterable[Process]) -> frozenset[str] | None:
    return next((found for agent in agents if (found := system.capabilities_of(agent)) is not None), None)


def _in_pod() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ


def _tables(config: Config, this_node: Node | None) -> tuple[Backend | None, list[Finding]]:
    """Check tools, kernel and tables; return the backend, None without tools, and the findings."""
    try:
        backend = kernel.choose_backend(config.iptables_backend.value)
    except Missing as error:
        return None, [checks.no_tools(str(error))]
    chains: checks.Chains = {}
    findings = [finding for family in Family for finding in _tools(config, this_node, backend, family)]
    findings += _networks(config, this_node, backend)
    findings += [finding for family in Family for finding in _contents(backend, family, chains)]
    return backend, [*findings, _other_modes(chains), *live_firewalls(backend)]


def _tools(config: Config, this_node: Node | None, backend: Backend, family: Family) -> Iterator[Finding]:
    primary = family is primary_family(config, this_node)
    if family is Family.IPV6 and (disabled := kernel.ipv6_disabled()):
        yield checks.ipv6_disabled(disabled, primary, family in _families(config, this_node))
        return
    try:
        opened = kernel.open_iptables(backend, family)
    except KernelError as error:
        yield checks.no_tools(str(error), family, primary)
        return
    yield checks.version(opened.tools)
    try:
        if reason := kernel.unsupported_reason(backend, family):
            yield checks.unavailable(reason, family, primary)
        else:
            yield from checks.features(features.try_features(opened), family, primary)
    except KernelError as error:
        yield Check("kernel", family).skip(f"the kernel's features are unknown: {_reason(error)}")


def _networks(config: Config, this_node: Node | None, backend: Backend) -> Iterator[Finding]:
    try:
        reasons = {family: kernel.unsupported_reason(backend, family) for family in Family}
    except KernelError:
        return  # another finding reports missing privileges
    unsupported = {family: reason for family, reason in reasons.items() if reason}
    if reason := missing_network(config, this_node, unsupported):
        yield checks.missing_network(reason)


def _contents(backend: Backend, family: Family, chains: checks.Chains) -> Iterator[Finding]:
    """Check the tables of both backends; add the chains of the one in use to `chains`."""
    try:
        used = _saved(backend, family)
        chains |= used
        yield checks.in_use(backend, family, used)
    except (Missing, NotPermitted) as error:
        yield _not_read("tables", backend, family, error)
    except KernelError as error:
        message = f"the {backend.value} tables cannot be read: {error}"
        yield Check("tables", family).fail(
            message, "The agent reads them when it starts. Fix the cause first."
        )
    other = Backend.LEGACY if backend is Backend.NFT else Backend.NFT
    try:
        unused = legacy.legacy_chains(family) if other is Backend.LEGACY else _saved(other, family)
        yield checks.not_in_use(other, family, unused)
    except KernelError as error:
        yield _not_read("other-tables", other, family, error)


def _saved(backend: Backend, family: Family) -> checks.Chains:
    """Return the number of rules by chain; none if the kernel does not support these tables."""
    try:
        live = kernel.open_iptables(backend, family).save()
    except KernelError as error:
        if isinstance(error, Missing | NotPermitted) or kernel.has_nat(backend, family):
            raise
        return {}
    return {key: len(rules) for key, rules in live.chains.items()}


def _not_read(check: str, backend: Backend, family: Family, error: KernelError) -> Finding:
    """Report tables that could not be read, through no fault of the node."""
    return Check(check, family).skip(f"the {backend.value} tables could not be read: {_reason(error)}")


def _reason(error: KernelError) -> str:
    """Return the cause. Another finding reports missing privileges."""
    return "not permitted" if isinstance(error, NotPermitted) else str(error)


def _other_modes(chains: checks.Chains) -> Finding:
    try:
        tables = [leftovers.nftables_name(family) for family in leftovers.nftables_tables()]
        servers = leftovers.virtual_servers().of_kube_proxy
    except PermissionError:
        return checks.LEFTOVERS.skip(
            "could not look for leftovers of other modes of kube-proxy: not permitted"
        )
    return checks.other_modes(tables, len(servers), leftovers.has_interface(), chains)


def _others(config: Config, running: Sequence[Process]) -> Iterator[Finding]:
    listen_addresses = {
        "healthz-bind-address": config.health_address,
        "metrics-bind-address": config.metrics_address,
    }
    agent_ports = {flag: address.port for flag, address in listen_addresses.items() if address}
    yield checks.proxies(running)
    yield from checks.ports(agent_ports, system.listeners(agent_ports.values()))


def _settings(config: Config, this_node: Node | None, node_ports: tuple[int, int]) -> Iterator[Finding]:
    local_ports = _read("net/ipv4/ip_local_port_range")
    yield checks.node_ports(node_ports, local_ports, _read("net/ipv4/ip_local_reserved_ports"))
    families = _families(config, this_node)
    for family in Family:
        yield checks.forwarding(
            family, _read(checks.FORWARDING[family].replace(".", "/")), family in families
        )
    bridges = [interface.name for interface in network.interfaces() if interface.kind == "bridge"]
    yield checks.reverse_path({name: _reverse_path(name) for name in _uplinks(bridges)})
    for family in Family:
        if family in families:
            value = _read(checks.CALL_IPTABLES[family].replace(".", "/"))
            yield checks.bridged(family, bridges, config.detect_local.bridge_interface, value)
    count = _read("net/netfilter/nf_conntrack_count")
    yield checks.connections(count, _read("net/netfilter/nf_conntrack_max"))


def _read(name: str) -> str | None:
    try:
        return system.read_setting(name)
    except system.SettingError:
        return None


def _families(config: Config, this_node: Node | None) -> set[Family]:
    node_cidrs = this_node.addresses + this_node.pod_cidrs if this_node else ()
    local = config.detect_local
    pod_cidrs = local.cluster_cidrs if local.mode is DetectLocalMode.CLUSTER_CIDR else ()
    return {primary_family(config, this_node), *map(family_of, (*pod_cidrs, *node_cidrs))}


def _uplinks(bridges: Iterable[str]) -> set[str]:
    """Return the interfaces to other nodes: unlike those of pods, they have a network, not a single address."""
    return {
        local.interface
        for local in kernel.local_addresses(Family.IPV4)
        if local.prefix_length < 32 and local.interface not in ("lo", *bridges)
    }


def _reverse_path(interface: str) -> str:
    """Return the effective rp_filter: the higher setting, although 2 (loose) is less strict than 1."""
    return max(_read(f"net/ipv4/conf/{name}/rp_filter") or "0" for name in ("all", interface))


def _server(config: Config, node_name: str, as_agent: bool) -> tuple[Node | None, tuple[Finding, ...]]:
    """Check the access to the API server, and return its Node object too; `as_agent`: see `checks.api_server`."""
    connection = config.client
    if not (connection.kubeconfig or connection.master or _in_pod()):
        return None, checks.no_server()
    from pykubeproxy.sources import SourceError
    from pykubeproxy.sources.queries import server_access

    try:
        found = server_access(open_client(config), node_name)
    except SourceError as error:
        return None, checks.unusable_server(str(error), as_agent)
    return found.node, checks.api_server(found, node_name, as_agent, by_service=_is_service(found.server))


def _is_service(server: str) -> bool:
    """Return whether this URL has the address of the Service `kubernetes`, which the kubelet names in each pod."""
    service = urlsplit(os.environ.get("KUBERNETES_PORT", "")).hostname
    return service is not None and urlsplit(server).hostname == service
