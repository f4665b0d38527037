"""`pykubeproxy check`: check that this node meets the requirements of the proxy."""

import os
from collections.abc import Iterable, Iterator

import click

from pykubeproxy import kernel
from pykubeproxy.cli import logs
from pykubeproxy.cli.flags import CONTEXT_SETTINGS, config_options, output_option, read_config
from pykubeproxy.cli.inputs import host_name
from pykubeproxy.cli.terminal import echo_json, echo_styled
from pykubeproxy.config import Config
from pykubeproxy.inspect.preflight import cluster, render_json, render_text, settings, tables, tools
from pykubeproxy.inspect.preflight import processes as process_checks
from pykubeproxy.inspect.preflight.model import Finding, passed
from pykubeproxy.kernel import (
    Backend,
    KernelError,
    Missing,
    NotPermitted,
    addresses,
    legacy,
    nftables,
    processes,
    system,
    trial,
)
from pykubeproxy.objects import Family, Node, family_of
from pykubeproxy.rules.context import primary_family
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.sources import Client, SourceError
from pykubeproxy.sources.access import access

_NOT_PERMITTED = "not permitted"


def _port_range(_context: click.Context, _option: click.Parameter, value: str) -> tuple[int, int]:
    """Parse a range such as "30000-32767". Raise BadParameter."""
    first, _, last = value.partition("-")
    if first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 65536:
        return int(first), int(last)
    raise click.BadParameter(f'"{value}" is not a port range such as 30000-32767')


@click.command(context_settings=CONTEXT_SETTINGS, short_help="Check that this node can run the proxy.")
@click.option(
    "--node-port-range",
    metavar="FIRST-LAST",
    callback=_port_range,
    default="30000-32767",
    show_default=True,
    help="The --service-node-port-range of the API server.",
)
@output_option
@config_options
def check(node_port_range: tuple[int, int], output: str, flags: dict[str, object]) -> None:
    """Check that this node can run the proxy, and print what to do about each problem.

    Check privileges, iptables, kernel features and settings, the tables of both backends, other proxies, and the API
    server if one is configured. Kernel features are tried in a separate network namespace and nothing on the node
    changes, so run this at any time, also before installation. Accepts the flags of `run`. The exit code is 1 if a
    check fails, else 0.

    \b
    sudo pykubeproxy check
    sudo pykubeproxy check --config /var/lib/kube-proxy/config.conf -o json
    """
    config = read_config(flags)
    node_name = config.hostname_override or host_name()
    node, cluster_findings = _cluster(config, node_name)
    backend, table_findings = _tables(config, node)
    findings = [
        tools.privileges(system.capabilities()),
        *table_findings,
        *_others(config),
        *_settings(config, node, node_port_range),
        *cluster_findings,
    ]
    if output == "json":
        echo_json(render_json.document(findings, node_name, backend.value if backend else ""))
    else:
        echo_styled(render_text.text(findings))
    if not passed(findings):
        raise SystemExit(1)


def _tables(config: Config, node: Node | None) -> tuple[Backend | None, list[Finding]]:
    """Check tools, kernel and tables; return the backend, None without tools, and the findings."""
    try:
        backend = kernel.choose_backend(config.iptables_backend.value)
    except Missing as error:
        return None, [tools.no_tools(str(error))]
    primary = primary_family(config, node)
    findings = list[Finding]()
    chains = dict[ChainKey, int]()
    for family in Family:
        findings += _tools(backend, family, family is primary)
    for family in Family:
        in_tables, present = _contents(backend, family)
        findings += in_tables
        chains |= present
    return backend, [*findings, _other_modes(chains)]


def _tools(backend: Backend, family: Family, primary: bool) -> Iterator[Finding]:
    """Check the commands and kernel features for a family."""
    try:
        iptables = kernel.open_iptables(backend, family)
    except KernelError as error:
        yield tools.no_tools(str(error), family)
        return
    yield tools.version(iptables.tools)
    try:
        if reason := kernel.unsupported_reason(backend, family):
            yield tools.unavailable(reason, family, primary)
        else:
            yield from tools.features(trial.try_features(iptables), family)
    except KernelError as error:
        yield tools.features_unknown(_reason(error), family)


def _contents(backend: Backend, family: Family) -> tuple[list[Finding], dict[ChainKey, int]]:
    """Check the tables of both backends; return the findings and the chains of the one in use."""
    other = Backend.LEGACY if backend is Backend.NFT else Backend.NFT
    findings = list[Finding]()
    chains = dict[ChainKey, int]()
    try:
        chains = _saved(backend, family)
        findings.append(tables.in_use(backend, family, chains))
    except NotPermitted:
        findings.append(tables.not_read("tables", backend, family, _NOT_PERMITTED))
    except KernelError as error:
        findings.append(tables.unreadable(backend, family, str(error)))
    try:
        unused = legacy.legacy_chains(family) if other is Backend.LEGACY else _saved(other, family)
        findings.append(tables.not_in_use(other, family, unused))
    except KernelError as error:
        findings.append(tables.not_read("other-tables", other, family, _reason(error)))
    return findings, chains


def _saved(backend: Backend, family: Family) -> dict[ChainKey, int]:
    """Return the number of rules by chain; none if the kernel does not support these tables."""
    try:
        live = kernel.open_iptables(backend, family).save()
    except NotPermitted:
        raise
    except KernelError as error:
        if isinstance(error, Missing) or not kernel.unsupported_reason(backend, family):
            raise
        return {}
    return {key: len(rules) for key, rules in live.chains.items()}


def _reason(error: KernelError) -> str:
    """Return the cause. Another finding reports missing privileges."""
    return _NOT_PERMITTED if isinstance(error, NotPermitted) else str(error)


def _other_modes(chains: Iterable[ChainKey]) -> Finding:
    present = {interface.name for interface in addresses.interfaces()}
    try:
        left = [family for family in Family if nftables.has_table(family, "kube-proxy")]
    except PermissionError:
        return tables.other_modes_unknown(_NOT_PERMITTED)
    except OSError:
        left = []  # this kernel has no nftables
    return tables.other_modes(left, processes.ipvs_virtual_services(), "kube-ipvs0" in present, chains)


def _others(config: Config) -> Iterator[Finding]:
    """Check for other proxies and the ports of the agent."""
    listen_addresses = {
        "healthz-bind-address": config.health_address,
        "metrics-bind-address": config.metrics_address,
    }
    agent_ports = {flag: address.port for flag, address in listen_addresses.items() if address}
    yield process_checks.proxies(processes.namespace_processes())
    yield from process_checks.ports(agent_ports, processes.listeners(agent_ports.values()))


def _settings(config: Config, node: Node | None, node_ports: tuple[int, int]) -> Iterator[Finding]:
    yield settings.node_ports(
        node_ports, _read("net/ipv4/ip_local_port_range"), _read("net/ipv4/ip_local_reserved_ports")
    )
    needed = _families(config, node)
    yield settings.forwarding(Family.IPV4, _read("net/ipv4/ip_forward"), Family.IPV4 in needed)
    yield settings.forwarding(Family.IPV6, _read("net/ipv6/conf/all/forwarding"), Family.IPV6 in needed)
    present = addresses.interfaces()
    bridges = [interface.name for interface in present if interface.kind == "bridge"]
    yield settings.reverse_path({name: _reverse_path(name) for name in _uplinks(bridges)})
    for family, setting in ((Family.IPV4, "iptables"), (Family.IPV6, "ip6tables")):
        if family in needed:
            value = _read(f"net/bridge/bridge-nf-call-{setting}")
            yield settings.bridged(family, bridges, config.detect_local.bridge_interface, value)
    yield settings.connections(
        _read("net/netfilter/nf_conntrack_count"), _read("net/netfilter/nf_conntrack_max")
    )


def _read(name: str) -> str | None:
    try:
        return system.read_setting(name)
    except system.SettingError:
        return None


def _families(config: Config, node: Node | None) -> set[Family]:
    """Return the address families of the cluster, by configuration and Node."""
    cluster_addresses = (
        *config.detect_local.cluster_cidrs,
        *(node.addresses + node.pod_cidrs if node else ()),
    )
    return {primary_family(config, node), *map(family_of, cluster_addresses)}


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


def _cluster(config: Config, node_name: str) -> tuple[Node | None, tuple[Finding, ...]]:
    """Check the access to the API server; return its Node object too."""
    connection = config.client
    if not (connection.kubeconfig or connection.master or "KUBERNETES_SERVICE_HOST" in os.environ):
        return None, cluster.not_configured()
    # Keep log lines about skipped objects out of standard output.
    logs.set_up(config.logging.format)
    try:
        client = Client(connection.kubeconfig, connection.master, connection.qps, connection.burst)
        found = access(client, node_name)
    except SourceError as error:
        return None, cluster.unusable(str(error))
    return found.node, cluster.cluster(found, node_name)
