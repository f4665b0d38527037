"""`pykubeproxy trace`: show where a packet goes, and why."""

import ipaddress
from typing import Literal

import click
import msgspec

from pykubeproxy.cli.flags import (
    CONTEXT_SETTINGS,
    choice_option,
    config_options,
    node_address_option,
    read_config,
)
from pykubeproxy.cli.help import OUTPUT, QUESTION, SOURCE, command, option
from pykubeproxy.cli.inputs import context_of, read_objects
from pykubeproxy.cli.node_rules import node_rules, rules_errors
from pykubeproxy.cli.rules_files import rules_option
from pykubeproxy.cli.terminal import echo_json, echo_styled
from pykubeproxy.config import Config, DetectLocalMode
from pykubeproxy.inspect.trace import render as views
from pykubeproxy.inspect.trace.model import trace_packet
from pykubeproxy.inspect.trace.packet import Host, Packet
from pykubeproxy.inspect.trace.render_svg import svg
from pykubeproxy.objects import Family, family_of
from pykubeproxy.rules.difference import installed
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import Ruleset

_NO_ADDRESSES = (
    "Note: rules match addresses of the node, which a file does not contain. Give each with --node-address."
)
_Origin = Literal["pod", "node", "outside"]


@command(context_settings=CONTEXT_SETTINGS, short_help="Trace a packet through the rules.")
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST:PORT")
@option(
    "--proto",
    type=click.Choice(["tcp", "udp", "sctp"], case_sensitive=False),
    default="tcp",
    show_default=True,
    help="Protocol of the packet.",
    group=QUESTION,
)
@option(
    "--from",
    "origin",
    type=click.Choice(["pod", "node", "outside"]),
    help="Origin of the packet.  [default: the node if SRC is one of its addresses, else outside]",
    group=QUESTION,
)
@option(
    "--in-interface",
    default="",
    metavar="NAME",
    help="Incoming interface.  [default: the one with the route to SRC]",
    group=QUESTION,
)
@option(
    "-f",
    "--filename",
    metavar="PATH",
    help='Use the rules for objects in a YAML or JSON file, a folder or "-" instead of the live rules.',
    group=SOURCE,
)
@rules_option
@node_address_option
@choice_option(
    "-o",
    "--output",
    choices=("text", "json", "svg"),
    help="Output format; svg is a picture for a browser.",
    group=OUTPUT,
)
@config_options
@rules_errors()
def trace(
    source: str,
    destination: str,
    proto: str,
    origin: _Origin | None,
    in_interface: str,
    filename: str | None,
    files: tuple[str, ...],
    addresses: tuple[str, ...],
    output: str,
    flags: dict[str, object],
) -> None:
    """Trace the first packet of a connection from SRC to DST:PORT through the rules of this node.

    Show the endpoints it may reach with their probabilities, whether its source address is masqueraded, or which rule
    drops or rejects it. This follows foreign rules too, sends no packet and changes nothing.

    With --rules, trace through the rules of another node; name its addresses with --node-address. With -f, the flags of
    `run` define the rules. Both need neither root nor a network.

    \b
    pykubeproxy trace 10.244.1.5 10.96.0.10:53 --proto udp
    pykubeproxy trace 10.244.1.5 10.96.0.10:80 --rules node1.txt
    pykubeproxy trace 2001:db8::7 [2001:db8::80]:443 -f objects.yaml -o json
    pykubeproxy trace 10.244.1.5 10.96.0.10:80 -o svg > trace.svg
    """
    config = read_config(flags)
    packet = _packet(source, destination, proto)
    if origin == "node" and in_interface:
        raise click.UsageError("a packet from the node has no incoming interface; remove --in-interface")
    family = family_of(packet.destination)
    if filename is not None and files:
        raise click.UsageError("--rules cannot be combined with -f; remove one of them")
    if filename is not None:
        ruleset, host = _rendered(config, filename, addresses, family)
    else:
        rules = node_rules(files, config.iptables_backend.value, addresses)
        ruleset, host = rules.for_packets(family)
    if origin == "pod" and not host.routes:
        in_interface = in_interface or _pod_interface(config)
    from_node = origin == "node" or (origin is None and not in_interface and host.is_local(packet.source))
    packet = msgspec.structs.replace(packet, starts_here=from_node, received_by=in_interface)
    # Live chains are read when the packet reaches them.
    walked = trace_packet(ruleset, packet, host)
    if files and not addresses and any("-type LOCAL" in it.rule for it in walked.steps):
        click.echo(_NO_ADDRESSES, err=True)
    if output == "json":
        echo_json(views.document(walked))
    elif output == "svg":
        click.echo(svg(walked), nl=False)
    else:
        echo_styled(views.text(walked))


def _packet(source: str, destination: str, protocol: str) -> Packet:
    """Parse the arguments into a packet. Raises UsageError."""
    address, _, port = destination.rpartition(":")
    try:
        receiver = _address(address)
        number = int(port) if port.isascii() and port.isdecimal() else 0
    except ValueError:
        number = 0
    # Without brackets, the last group of an IPv6 address looks like a port.
    if not 0 < number < 65536 or (":" in receiver and address[0] != "["):
        raise click.UsageError(
            f'"{destination}" does not have the form address:port, or [address]:port for IPv6'
        )
    try:
        sender = _address(source)
    except ValueError:
        raise click.UsageError(f'"{source}" is not an IP address') from None
    if family_of(sender) is not family_of(receiver):
        raise click.UsageError(f"{sender} and {receiver} are of different address families")
    return Packet(protocol.lower(), sender, receiver, number)


def _address(text: str) -> str:
    """Return a canonical address, without brackets. Raises ValueError."""
    if "%" in text:
        raise ValueError("rules cannot match zones")
    return str(ipaddress.ip_address(text[1:-1] if text[:1] + text[-1:] == "[]" else text))


def _rendered(
    config: Config, filename: str, addresses: tuple[str, ...], family: Family
) -> tuple[Ruleset, Host]:
    cluster, node = read_objects(filename, config)
    context = context_of(config, node, family, addresses)
    host = Host(frozenset((*(addresses or node.addresses), context.options.node_ip)))
    return installed(render(cluster, context), context.options), host


def _pod_interface(config: Config) -> str:
    """Return the incoming interface of pod traffic, if the configuration detects pods by interface."""
    detect = config.detect_local
    match detect.mode:
        case DetectLocalMode.BRIDGE_INTERFACE:
            return detect.bridge_interface
        case DetectLocalMode.INTERFACE_NAME_PREFIX:
            return detect.interface_name_prefix
        case _:
            return ""
