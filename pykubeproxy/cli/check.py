"""`check`: check that nodes can run the proxy, and say what to do about problems."""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click
import msgspec

from pykubeproxy import garbage, kernel
from pykubeproxy.cli import logs
from pykubeproxy.cli.cluster import (
    ClusterOptions,
    cluster_options,
    node_option,
    selected_nodes,
)
from pykubeproxy.cli.emit import emit, report_option
from pykubeproxy.cli.flags import CONTEXT_SETTINGS, config_options, read_config
from pykubeproxy.cli.help import DIFFERENT, NOT_ANSWERED, OUTPUT, QUESTION, SOURCE, command, option
from pykubeproxy.cli.sources import check_url, read_errors, url_option
from pykubeproxy.cli.terminal import click_errors, progress
from pykubeproxy.config.kinds import NODE_PORT_ADDRESSES
from pykubeproxy.inspect.check.migration import MODES, Migration
from pykubeproxy.inspect.check.report import check_report
from pykubeproxy.kernel import NotANode
from pykubeproxy.nodes.agent import NoAgent, UnusableAnswer, agent_state

# Only a check of this node needs the packages for Linux.
if TYPE_CHECKING:
    from pykubeproxy.nodes.this_node_checks import CheckedConfig


_verbose_option = option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Show what passed and what was skipped too, as -o wide does.",
    group=OUTPUT,
)


_migrate_option = option(
    "--migrate-to",
    type=click.Choice(MODES),
    help="Check what clients notice if kube-proxy changes to this mode, instead of the proxy.",
    group=QUESTION,
)


def _port_range(_context: click.Context, _option: click.Parameter, value: str) -> tuple[int, int]:
    """Parse a range such as "30000-32767". Raises BadParameter."""
    first, _, last = value.partition("-")
    if first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 65536:
        return int(first), int(last)
    raise click.BadParameter(f'"{value}" is not a port range such as 30000-32767')


def _addresses(_context: click.Context, _option: click.Parameter, value: str) -> tuple[str, ...]:
    """Parse a value of nodePortAddresses. Raises BadParameter."""
    try:
        found = NODE_PORT_ADDRESSES.effective(tuple(filter(None, value.split(","))))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return found if isinstance(found, tuple) else ()


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
@_migrate_option
@url_option(unless="flags of `run`")
@_verbose_option
@report_option()
@functools.partial(config_options, without="v")
@click_errors(NotANode)
@read_errors()
def check(
    node_port_range: tuple[int, int],
    migrate_to: str | None,
    url: str | None,
    verbose: bool,
    output: str,
    flags: dict[str, object],
) -> None:
    """Check that this node can run the proxy, and print each problem and what to do about it.

    Check privileges, iptables, kernel features and settings, the tables of both backends, other proxies, and the API
    server if one is configured. This tries kernel features in a separate network namespace and changes nothing on the
    node. Run it at any time, even before installation.

    The configuration is that of the agent on this node, if one answers, or follows from the flags of `run`. A check that
    cannot run is skipped, with the reason: a debug pod, for example, does not have the agent's permissions.

    With --migrate-to, name what fails or changes for clients of Services if a kube-proxy in this mode serves the node:
    with the settings that its rules show now, or with --nodeport-addresses.

    \b
    sudo pykubeproxy check
    sudo pykubeproxy check --migrate-to nftables
    sudo pykubeproxy check --config /var/lib/kube-proxy/config.conf -o json
    """
    check_url(url, flags)
    kernel.require_node()
    # It needs the extra `node`.
    from pykubeproxy.nodes.this_node_checks import check_migration, check_this_node

    garbage.collect_rarely()
    wanted = _configuration(url, flags)
    logs.set_up(wanted.config.logging.format)
    one = check_migration(wanted, migrate_to) if migrate_to else check_this_node(wanted, node_port_range)
    found = check_report([one])
    emit(found, "wide" if verbose and output == "text" else output)
    if not found.passed:
        raise SystemExit(DIFFERENT)


def _configuration(url: str | None, flags: Mapping[str, object]) -> "CheckedConfig":
    """Return the configuration, which is the agent's if one answers and no flags are given."""
    from pykubeproxy.nodes.this_node_checks import CheckedConfig

    config = read_config(flags)
    if flags:
        title = f"--config {flags['config']}" if "config" in flags else "flags"
        names_server = bool(config.client.kubeconfig or config.client.master)
        return CheckedConfig(config, title, names_server=names_server)
    try:
        agent = agent_state(url)
    except (NoAgent, UnusableAnswer) as error:
        return CheckedConfig(config, f"default settings; {error}")
    this_node = agent.objects.node
    config = msgspec.structs.replace(agent.config, hostname_override=this_node.name)
    return CheckedConfig(config, f"agent at {agent.url}", this_node)


@command(
    "check",
    short_help="Check the proxies of nodes, and print what to do about problems.",
    exit_codes={
        0: "No check failed.",
        1: "A check failed on a node.",
        2: "Wrong usage or a failure, or a node could not be read.",
    },
)
@_migrate_option
@option(
    "--nodeport-addresses",
    "node_port_addresses",
    default="",
    callback=_addresses,
    metavar="CIDR,...|primary|all",
    help="The nodePortAddresses of kube-proxy after it changes with --migrate-to.  [default: as now]",
    group=QUESTION,
)
@_verbose_option
@report_option()
@node_option
@cluster_options
def check_nodes(
    migrate_to: str | None,
    node_port_addresses: tuple[str, ...],
    verbose: bool,
    output: str,
    nodes: tuple[str, ...],
    cluster: ClusterOptions,
) -> None:
    """Check the proxies of nodes, and print each problem and what to do about it.

    On nodes with pykubeproxy, run `pykubeproxy check` in its pod. On others, check what can be seen from outside: the pod
    of kube-proxy, its version, the backend of its rules, and the jumps to its chains.

    With --migrate-to, name what fails or changes for clients of Services if kube-proxy in this mode serves the nodes.

    \b
    kubectl pykubeproxy check
    kubectl pykubeproxy check --migrate-to nftables
    kubectl pykubeproxy check --node node1 -v
    """
    from pykubeproxy.nodes.proxy_states import check_cluster

    with (
        selected_nodes(cluster, nodes) as (access, wanted),
        progress(len(wanted), "Checking nodes") as advance,
    ):
        migration = Migration(migrate_to, node_port_addresses) if migrate_to else None
        found, unread = check_cluster(access, wanted, advance, migration)
    emit(found, "wide" if verbose and output == "text" else output)
    if not found.passed:
        raise SystemExit(DIFFERENT)
    if unread:
        raise SystemExit(NOT_ANSWERED)
