"""`pykubeproxy check`: check that this node meets the requirements of the proxy."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import click
import msgspec

from pykubeproxy import garbage, kernel
from pykubeproxy.cli.client import NoAgent
from pykubeproxy.cli.flags import CONTEXT_SETTINGS, config_options, output_option, read_config
from pykubeproxy.cli.help import DIFFERENT, SOURCE, command, option
from pykubeproxy.cli.inputs import host_name, open_client
from pykubeproxy.cli.running_agent import UnusableAnswer, agent_state, check_url, url_option
from pykubeproxy.cli.terminal import click_errors, echo_json, echo_styled
from pykubeproxy.config import Config, DetectLocalMode
from pykubeproxy.inspect.preflight import cluster, iptables, node, report
from pykubeproxy.inspect.preflight.report import Check, Finding
from pykubeproxy.kernel import (
    Backend,
    KernelError,
    Missing,
    NotANode,
    NotPermitted,
    addresses,
    leftovers,
    legacy,
    processes,
    system,
    trial,
)
from pykubeproxy.kernel.processes import Process
from pykubeproxy.objects import Family, Node, family_of
from pykubeproxy.rules.context import missing_network, primary_family


def _port_range(_context: click.Context, _option: click.Parameter, value: str) -> tuple[int, int]:
    """Parse a range such as "30000-32767". Raises BadParameter."""
    first, _, last = value.partition("-")
    if first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 65536:
        return int(first), int(last)
    raise click.BadParameter(f'"{value}" is not a port range such as 30000-32767')


@command(
    context_settings=CONTEXT_SETTINGS,
    exit_codes={0: "No check failed.", 1: "A check failed.", 2: "Not checked: wrong usage or a failure."},
    short_help="Check that this node can run the proxy.",
)
@option(
    "--node-port-range",
    metavar="FIRST-LAST",
    callback=_port_range,
    default="30000-32767",
    show_default=True,
    help="The --service-node-port-range of the API server.",
    group=SOURCE,
)
@url_option(unless="flags of `run`")
@output_option
@config_options
@click_errors(NotANode)
def check(node_port_range: tuple[int, int], url: str | None, output: str, flags: dict[str, object]) -> None:
    """Check that this node can run the proxy, and print what to do about each problem.

    Check privileges, iptables, kernel features and settings, the tables of both backends, other proxies, and the API
    server if one is configured. This tries kernel features in a separate network namespace and changes nothing on the
    node. Run it at any time, even before installation.

    The configuration is that of the agent on this node, if one answers, or follows from the flags of `run`. A check that
    cannot run is skipped, with the reason: a debug pod, for example, does not have the agent's permissions.

    \b
    sudo pykubeproxy check
    sudo pykubeproxy check --config /var/lib/kube-proxy/config.conf -o json
    """
    check_url(url, flags)
    kernel.require_node()
    garbage.collect_rarely()
    config, configuration, this_node = _configuration(url, flags)
    node_name = config.hostname_override or host_name()
    running = processes.namespace_processes()
    agents = [process for process in running if node.is_agent(process)]
    found_node, cluster_findings = _cluster(config, node_name, _is_agent_connection(config, flags, agents))
    this_node = found_node or this_node
    backend, table_findings = _tables(config, this_node)
    findings = [
        iptables.privileges(system.capabilities(), _capabilities(agents), _in_pod()),
        *table_findings,
        *_others(config, running),
        *_settings(config, this_node, node_port_range),
        *cluster_findings,
    ]
    if output == "json":
        backend_name = backend.value if backend else ""
        echo_json(report.document(findings, node_name, backend_name, configuration))
    else:
        echo_styled(report.text(findings, configuration))
    if not report.passed(findings):
        raise SystemExit(DIFFERENT)


def _configuration(url: str | None, flags: Mapping[str, object]) -> tuple[Config, str, Node | None]:
    """Return the configuration, where it comes from, and the agent's Node if that is the agent."""
    config = read_config(flags)
    if flags:
        return config, f"--config {flags['config']}" if "config" in flags else "flags", None
    try:
        agent = agent_state(url)
    except (NoAgent, UnusableAnswer) as error:
        return config, f"default settings; {error}", None
    this_node = agent.objects.node
    config = msgspec.structs.replace(agent.config, hostname_override=this_node.name)
    return config, f"agent at {agent.url}", this_node


def _is_agent_connection(config: Config, flags: Mapping[str, object], agents: Iterable[Process]) -> bool:
    """Return whether the agent uses the same address and account: flags name them, or it runs in this container."""
    named = bool(flags and (config.client.kubeconfig or config.client.master))
    return named or any(map(processes.shares_container, agents))


def _capabilities(agents: Iterable[Process]) -> frozenset[str] | None:
    """Return the capabilities of the first agent; None if none runs."""
    return next((found for it in agents if (found := processes.capabilities(it)) is not None), None)


def _in_pod() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ


def _tables(config: Config, this_node: Node | None) -> tuple[Backend | None, list[Finding]]:
    """Check tools, kernel and tables; return the backend, None without tools, and the findings."""
    try:
        backend = kernel.choose_backend(config.iptables_backend.value)
    except Missing as error:
        return None, [iptables.no_tools(str(error))]
    chains: iptables.Chains = {}
    findings = [it for family in Family for it in _tools(config, this_node, backend, family)]
    findings += _networks(config, this_node, backend)
    findings += [it for family in Family for it in _contents(backend, family, chains)]
    return backend, [*findings, _other_modes(chains)]


def _tools(config: Config, this_node: Node | None, backend: Backend, family: Family) -> Iterator[Finding]:
    primary = family is primary_family(config, this_node)
    if family is Family.IPV6 and (disabled := kernel.ipv6_disabled()):
        yield iptables.ipv6_disabled(disabled, primary, family in _families(config, this_node))
        return
    try:
        opened = kernel.open_iptables(backend, family)
    except KernelError as error:
        yield iptables.no_tools(str(error), family, primary)
        return
    yield iptables.version(opened.tools)
    try:
        if reason := kernel.unsupported_reason(backend, family):
            yield iptables.unavailable(reason, family, primary)
        else:
            yield from iptables.features(trial.try_features(opened), family)
    except KernelError as error:
        yield Check("kernel", family).skip(f"the kernel's features are unknown: {_reason(error)}")


def _networks(config: Config, this_node: Node | None, backend: Backend) -> Iterator[Finding]:
    try:
        reasons = {family: kernel.unsupported_reason(backend, family) for family in Family}
    except KernelError:
        return  # another finding reports missing privileges
    unsupported = {family: reason for family, reason in reasons.items() if reason}
    if reason := missing_network(config, this_node, unsupported):
        yield iptables.missing_network(reason)


def _contents(backend: Backend, family: Family, chains: iptables.Chains) -> Iterator[Finding]:
    """Check the tables of both backends; add the chains of the one in use to `chains`."""
    try:
        used = _saved(backend, family)
        chains |= used
        yield iptables.in_use(backend, family, used)
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
        yield iptables.not_in_use(other, family, unused)
    except KernelError as error:
        yield _not_read("other-tables", other, family, error)


def _saved(backend: Backend, family: Family) -> iptables.Chains:
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


def _other_modes(chains: iptables.Chains) -> Finding:
    try:
        tables = [leftovers.nftables_name(family) for family in leftovers.nftables_tables()]
        servers = leftovers.virtual_servers().of_kube_proxy
    except PermissionError:
        return iptables.LEFTOVERS.skip(
            "could not look for leftovers of other modes of kube-proxy: not permitted"
        )
    return iptables.other_modes(tables, len(servers), leftovers.has_interface(), chains)


def _others(config: Config, running: Sequence[Process]) -> Iterator[Finding]:
    listen_addresses = {
        "healthz-bind-address": config.health_address,
        "metrics-bind-address": config.metrics_address,
    }
    agent_ports = {flag: address.port for flag, address in listen_addresses.items() if address}
    yield node.proxies(running)
    yield from node.ports(agent_ports, processes.listeners(agent_ports.values()))


def _settings(config: Config, this_node: Node | None, node_ports: tuple[int, int]) -> Iterator[Finding]:
    local_ports = _read("net/ipv4/ip_local_port_range")
    yield node.node_ports(node_ports, local_ports, _read("net/ipv4/ip_local_reserved_ports"))
    families = _families(config, this_node)
    for family in Family:
        yield node.forwarding(family, _read(node.FORWARDING[family].replace(".", "/")), family in families)
    bridges = [interface.name for interface in addresses.interfaces() if interface.kind == "bridge"]
    yield node.reverse_path({name: _reverse_path(name) for name in _uplinks(bridges)})
    for family in Family:
        if family in families:
            value = _read(node.CALL_IPTABLES[family].replace(".", "/"))
            yield node.bridged(family, bridges, config.detect_local.bridge_interface, value)
    count = _read("net/netfilter/nf_conntrack_count")
    yield node.connections(count, _read("net/netfilter/nf_conntrack_max"))


def _read(name: str) -> str | None:
    try:
        return system.read_setting(name)
    except system.SettingError:
        return None


def _families(config: Config, this_node: Node | None) -> set[Family]:
    """Return the address families of the cluster, by configuration and Node."""
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


def _cluster(config: Config, node_name: str, as_agent: bool) -> tuple[Node | None, tuple[Finding, ...]]:
    """Check the access to the API server, and return its Node object too; `as_agent`: see `cluster.cluster`."""
    connection = config.client
    if not (connection.kubeconfig or connection.master or _in_pod()):
        return None, cluster.not_configured()
    from pykubeproxy.sources import SourceError
    from pykubeproxy.sources.access import access

    try:
        found = access(open_client(config), node_name)
    except SourceError as error:
        return None, cluster.unusable(str(error), as_agent)
    return found.node, cluster.cluster(found, node_name, as_agent)
