"""`pykubeproxy check`: whether this node is fit for the proxy."""

import os
from collections.abc import Iterable, Iterator

import click

from pykubeproxy import kernel
from pykubeproxy.cli import logs
from pykubeproxy.cli.flags import CONTEXT_SETTINGS, config_options, load_config
from pykubeproxy.cli.output import echo_json, echo_styled
from pykubeproxy.cli.present import host_name
from pykubeproxy.config import Config
from pykubeproxy.inspect.preflight import cluster, forms, neighbours, settings, tables, tools
from pykubeproxy.inspect.preflight.finding import Finding, fit
from pykubeproxy.kernel import (
    Backend,
    KernelError,
    Missing,
    NotPermitted,
    interfaces,
    ipvs,
    legacy,
    nftables,
    privileges,
    processes,
    sysctl,
    trial,
)
from pykubeproxy.objects import Family, Node, family_of
from pykubeproxy.rules.context import primary_family
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.sources import Client, SourceError
from pykubeproxy.sources.access import access

_NOT_PERMITTED = "not permitted"


def _port_range(_context: click.Context, _option: click.Parameter, value: str) -> tuple[int, int]:
    """Two ports, "30000-32767", as numbers. Raises BadParameter."""
    first, _, last = value.partition("-")
    if first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 65536:
        return int(first), int(last)
    raise click.BadParameter(f'"{value}" is not a range of ports such as 30000-32767')


@click.command(context_settings=CONTEXT_SETTINGS, short_help="Say whether this node is fit for the proxy.")
@click.option(
    "--node-port-range",
    metavar="FIRST-LAST",
    callback=_port_range,
    default="30000-32767",
    show_default=True,
    help="The API server's --service-node-port-range.",
)
@click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="The form."
)
@config_options
def check(node_port_range: tuple[int, int], output: str, flags: dict[str, object]) -> None:
    """Say whether this node is fit for the proxy, and what to do where it is not.

    Looks at privileges, iptables and kernel, at what is in the tables of both backends, at other proxies, at the
    kernel's settings, and at the API server if one is configured. What the kernel can do is tried in a network
    namespace of its own; nothing on the node is changed, so it may be run before installing and at any time after.
    The exit code is 1 if something fails, 0 else. The flags are those of `run`.

    \b
    sudo pykubeproxy check
    sudo pykubeproxy check --config /var/lib/kube-proxy/config.conf -o json
    """
    config, warnings = load_config(flags)
    for warning in warnings:
        click.echo(warning, err=True)
    node_name = config.hostname_override or host_name()
    node, asked = _ask_cluster(config, node_name)
    backend, found = _tables(config, node)
    findings = [
        tools.privileges(privileges.capabilities()),
        *found,
        *_others(config),
        *_settings(config, node, node_port_range),
        *asked,
    ]
    if output == "json":
        document = forms.document(findings, node_name, backend.value if backend else "")
        echo_json(document)
    else:
        echo_styled(forms.text(findings))
    if not fit(findings):
        raise SystemExit(1)


def _tables(config: Config, node: Node | None) -> tuple[Backend | None, list[Finding]]:
    """Tools, kernel and tables, and the backend that they are of; None without any tools."""
    try:
        backend = kernel.choose(config.iptables_backend.value)
    except Missing as error:
        return None, [tools.no_tools(str(error))]
    primary = primary_family(config, node)
    found = list[Finding]()
    chains = dict[ChainKey, int]()
    for family in Family:
        found += _tools(backend, family, family is primary)
    for family in Family:
        findings, present = _contents(backend, family)
        found += findings
        chains |= present
    return backend, [*found, _other_modes(chains)]


def _tools(backend: Backend, family: Family, primary: bool) -> Iterator[Finding]:
    """The commands for a family, and what rules can use in it."""
    try:
        iptables = kernel.open_iptables(backend, family)
    except KernelError as error:
        yield tools.no_tools(str(error), family)
        return
    yield tools.version(iptables.tools)
    try:
        if reason := kernel.unavailable(backend, family):
            yield tools.unavailable(reason, family, primary)
        else:
            yield from tools.features(trial.try_features(iptables), family)
    except KernelError as error:
        yield tools.features_unknown(_reason(error), family)


def _contents(backend: Backend, family: Family) -> tuple[list[Finding], dict[ChainKey, int]]:
    """What is in the tables of both backends."""
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
    """The chains of a backend and their numbers of rules; none where the kernel has no such tables."""
    try:
        live = kernel.open_iptables(backend, family).save()
    except NotPermitted:
        raise
    except KernelError as error:
        if isinstance(error, Missing) or not kernel.unavailable(backend, family):
            raise
        return {}
    return {key: len(rules) for key, rules in live.chains.items()}


def _reason(error: KernelError) -> str:
    """What went wrong. Which right is missing, the finding about privileges says."""
    return _NOT_PERMITTED if isinstance(error, NotPermitted) else str(error)


def _other_modes(chains: Iterable[ChainKey]) -> Finding:
    present = {interface.name for interface in interfaces.interfaces()}
    try:
        left = [family for family in Family if nftables.has_table(family, "kube-proxy")]
    except PermissionError:
        return tables.other_modes_unknown(_NOT_PERMITTED)
    except OSError:
        left = []  # this kernel has no nftables
    return tables.other_modes(left, ipvs.virtual_services(), "kube-ipvs0" in present, chains)


def _others(config: Config) -> Iterator[Finding]:
    """Other proxies, and the ports that the agent wants."""
    addresses = {
        "healthz-bind-address": config.health_address,
        "metrics-bind-address": config.metrics_address,
    }
    wanted = {flag: address.port for flag, address in addresses.items() if address}
    yield neighbours.proxies(processes.namespace_processes())
    yield from neighbours.ports(wanted, processes.listeners(wanted.values()))


def _settings(config: Config, node: Node | None, node_ports: tuple[int, int]) -> Iterator[Finding]:
    yield settings.node_ports(
        node_ports, _read("net/ipv4/ip_local_port_range"), _read("net/ipv4/ip_local_reserved_ports")
    )
    needed = _families(config, node)
    yield settings.forwarding(Family.IPV4, _read("net/ipv4/ip_forward"), Family.IPV4 in needed)
    yield settings.forwarding(Family.IPV6, _read("net/ipv6/conf/all/forwarding"), Family.IPV6 in needed)
    present = interfaces.interfaces()
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
        return sysctl.read(name)
    except sysctl.SysctlError:
        return None


def _families(config: Config, node: Node | None) -> set[Family]:
    """The families in which services are served, as far as configuration and Node tell."""
    known = (*config.detect_local.cluster_cidrs, *(node.addresses + node.pod_cidrs if node else ()))
    return {primary_family(config, node), *map(family_of, known)}


def _uplinks(bridges: Iterable[str]) -> set[str]:
    """The interfaces by which the node is reached: they have a network, not a single address as those of pods."""
    return {
        local.interface
        for local in kernel.local_addresses(Family.IPV4)
        if local.prefix_length < 32 and local.interface not in ("lo", *bridges)
    }


def _reverse_path(interface: str) -> str:
    """What is in force there: of the two settings the higher, though 2 (loose) is less strict than 1."""
    return max(_read(f"net/ipv4/conf/{name}/rp_filter") or "0" for name in ("all", interface))


def _ask_cluster(config: Config, node_name: str) -> tuple[Node | None, tuple[Finding, ...]]:
    """What the API server tells, and this node as it knows it."""
    to = config.client
    if not (to.kubeconfig or to.master or "KUBERNETES_SERVICE_HOST" in os.environ):
        return None, cluster.not_configured()
    # Sources log what they pass over; that is not to get among the output.
    logs.set_up(config.logging.format)
    try:
        found = access(Client(to.kubeconfig, to.master, to.qps, to.burst), node_name)
    except SourceError as error:
        return None, cluster.unusable(str(error))
    return found.node, cluster.cluster(found, node_name)
