"""`pykubeproxy trace`: where a packet would go, and why."""

import ipaddress
from typing import Literal

import click
import msgspec

from pykubeproxy import kernel
from pykubeproxy.cli.flags import CONTEXT_SETTINGS, config_options, load_config
from pykubeproxy.cli.live import backend_to_read
from pykubeproxy.cli.manifests import plain_addresses, read_objects
from pykubeproxy.cli.output import echo_json, echo_styled, output_option
from pykubeproxy.config import Config, DetectLocalMode
from pykubeproxy.inspect import trace_forms
from pykubeproxy.inspect.desired import as_installed
from pykubeproxy.inspect.packet import Host, Packet, Route
from pykubeproxy.inspect.trace import walk
from pykubeproxy.kernel import KernelError
from pykubeproxy.kernel.routes import routes
from pykubeproxy.objects import Family, family_of
from pykubeproxy.rules.context import KernelFacts, terms
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import Ruleset

_Origin = Literal["pod", "node", "outside"]


@click.command(context_settings=CONTEXT_SETTINGS, short_help="Show where a packet goes, and by which rules.")
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST:PORT")
@click.option(
    "--proto",
    type=click.Choice(["tcp", "udp", "sctp"], case_sensitive=False),
    default="tcp",
    show_default=True,
    help="The packet's protocol.",
)
@click.option(
    "--from",
    "origin",
    type=click.Choice(["pod", "node", "outside"]),
    help="Where it starts.  [default: on the node if SRC is one of its addresses, else elsewhere]",
)
@click.option(
    "--in-interface",
    default="",
    metavar="NAME",
    help="The interface it comes in by.  [default: the one that leads back to SRC]",
)
@click.option(
    "-f",
    "--filename",
    metavar="PATH",
    help='Instead of the live rules, those for the objects in a YAML or JSON file, a folder, or "-".',
)
@click.option(
    "--node-address",
    "addresses",
    multiple=True,
    callback=plain_addresses,
    metavar="CIDR",
    help="With -f, an address of the node; may be given several times.  [default: the Node's own]",
)
@output_option
@config_options
def trace(
    source: str,
    destination: str,
    proto: str,
    origin: _Origin | None,
    in_interface: str,
    filename: str | None,
    addresses: tuple[str, ...],
    output: str,
    flags: dict[str, object],
) -> None:
    """Show where a new connection from SRC to DST:PORT goes on this node, and by which rules.

    Walks the first packet through the rules, those of others too: to which endpoints it may get and how probably,
    whether its source address is replaced, or which rule drops or refuses it. Sends nothing and changes nothing. With
    -f neither root nor a network is needed; the flags of `run` say how the rules are made.

    \b
    pykubeproxy trace 10.244.1.5 10.96.0.10:53 --proto udp
    pykubeproxy trace 2001:db8::7 [2001:db8::80]:443 -f objects.yaml -o json
    """
    config, warnings = load_config(flags)
    for warning in warnings:
        click.echo(warning, err=True)
    packet = _packet(source, destination, proto)
    if origin == "node" and in_interface:
        raise click.UsageError(
            "a packet that starts on the node comes in by no interface: drop --in-interface"
        )
    family = family_of(packet.destination)
    if filename is not None:
        ruleset, host = _rendered(config, filename, addresses, family)
        in_interface = in_interface or (_pod_interface(config) if origin == "pod" else "")
    else:
        ruleset, host = _live(config, family)
    starts_here = origin == "node" or (origin is None and not in_interface and host.is_local(packet.source))
    packet = msgspec.structs.replace(packet, starts_here=starts_here, received_by=in_interface)
    try:
        # Live chains are read as the packet gets to them.
        walked = walk(ruleset, packet, host)
    except KernelError as error:
        raise click.ClickException(str(error)) from None
    if output == "json":
        echo_json(trace_forms.document(walked))
    else:
        echo_styled(trace_forms.text(walked))


def _packet(source: str, destination: str, protocol: str) -> Packet:
    """The packet the arguments describe. Raises UsageError."""
    address, _, port = destination.rpartition(":")
    try:
        to = _address(address)
        number = int(port) if port.isascii() and port.isdecimal() else 0
    except ValueError:
        number = 0
    # Without brackets nobody could tell an IPv6 address's last group from a port.
    if not 0 < number < 65536 or (":" in to and address[0] != "["):
        raise click.UsageError(f'"{destination}" is not of the form address:port, or [address]:port for IPv6')
    try:
        sender = _address(source)
    except ValueError:
        raise click.UsageError(f'"{source}" is not an IP address') from None
    if family_of(sender) is not family_of(to):
        raise click.UsageError(f"{sender} and {to} are of different families")
    return Packet(protocol.lower(), sender, to, number)


def _address(text: str) -> str:
    """An address in canonical form, in brackets or not. Raises ValueError."""
    if "%" in text:
        raise ValueError("rules know no zones")
    return str(ipaddress.ip_address(text[1:-1] if text[:1] + text[-1:] == "[]" else text))


def _live(config: Config, family: Family) -> tuple[Ruleset, Host]:
    try:
        backend = backend_to_read(config.iptables_backend.value)
        ruleset, _ = kernel.live(kernel.open_iptables(backend, family))
        local = kernel.local_addresses(family)
    except KernelError as error:
        raise click.ClickException(str(error)) from None
    ways = tuple(Route(*route) for route in routes(family))
    return ruleset, Host(frozenset(it.address for it in local), ways)


def _rendered(
    config: Config, filename: str, addresses: tuple[str, ...], family: Family
) -> tuple[Ruleset, Host]:
    cluster, node = read_objects(filename, config)
    own = tuple(it for it in (addresses or node.addresses) if family_of(it) is family)
    on = terms(config, node.name, node, KernelFacts(addresses=own), family)
    return as_installed(render(cluster, on), on.options), Host(frozenset((*own, on.options.node_ip)))


def _pod_interface(config: Config) -> str:
    """The interface that packets of pods come in by, if the configuration tells pods by it."""
    detect = config.detect_local
    match detect.mode:
        case DetectLocalMode.BRIDGE_INTERFACE:
            return detect.bridge_interface
        case DetectLocalMode.INTERFACE_NAME_PREFIX:
            return detect.interface_name_prefix
        case _:
            return ""
