"""Check that tables of nftables, such as those of firewalls, let packets to Services pass."""

import ipaddress
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import msgspec

from pykubeproxy.inspect.check.report import Check, Finding
from pykubeproxy.inspect.dump.nftables import nft_frontends
from pykubeproxy.inspect.limit import TooManyRules
from pykubeproxy.inspect.node import NodeRules
from pykubeproxy.inspect.packets.addresses import Addresses, every_address, subtract
from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.inspect.packets.rule_set import RuleSet
from pykubeproxy.inspect.packets.walk import Step, walk
from pykubeproxy.inspect.routes import FrontendRule, serving_rules
from pykubeproxy.objects import Family, family_of
from pykubeproxy.rules.names import NFT_TABLES, nft_title
from pykubeproxy.services.ports import ANY_LOCAL, FrontendKind
from pykubeproxy.wording import listed

# A firewall treats all frontends alike, apart from their ports.
_MOST_FRONTENDS = 200
_MOST_NAMED = 3
# The share of clients above which a rule is no list of clients to block.
_MOST_CLIENTS = 0.5
_ADVICE = (
    "Let that program accept them before this rule, as firewalld does with `ct status dnat accept`; `pykubeproxy trace`"
    " shows the way of a packet."
)
# Documentation addresses, which a default route leads to.
_OUTSIDE = {Family.IPV4: "192.0.2.1", Family.IPV6: "2001:db8::1"}


def firewalls(family: Family, rules: NodeRules, network: NodeNetwork) -> Iterator[Finding]:
    """Check the tables of nftables that are not kube-proxy's, if there are any."""
    check = Check("firewall", family)
    tables = _tables(rules)
    if not tables:
        return
    try:
        stopped = _stopped_traffic(family, rules, network)
    except TooManyRules as error:
        yield check.skip(str(error))
        return
    yield from (check.warn(message, _ADVICE) for message in stopped)
    if not stopped and next(packets_to_services(family, rules, network), None):
        yield check.ok(f"packets to Services pass nftables {listed(tables)}")


def _stopped_traffic(family: Family, rules: NodeRules, network: NodeNetwork) -> list[str]:
    """Return a message about each rule in these tables that stops packets to Services. Raises TooManyRules."""
    tables = _tables(rules)
    stopped: dict[Step, dict[str, None]] = {}
    for title, ways in packets_to_services(family, rules, network) if tables else ():
        for packets in ways:
            for step in set.intersection(*(stopping(rules.rule_sets, one, network) for one in packets)):
                if step.table in tables:
                    stopped.setdefault(step, {})[title] = None
    return [
        f"chain {step.chain} of nftables table {step.table} {step.does}s packets to"
        f" {listed(titles, _MOST_NAMED)}: {step.rule}"
        for step, titles in stopped.items()
    ]


def _tables(rules: NodeRules) -> list[str]:
    return [name for name in rules.nftables.tables() if name not in NFT_TABLES] if rules.nftables else []


def packets_to_services(
    family: Family, rules: NodeRules, network: NodeNetwork
) -> Iterator[tuple[str, Sequence[Sequence[Packet]]]]:
    """Yield frontends with packets to them: those of the node, and those of others by each interface."""
    own = network.own_addresses(family)
    others = subtract(every_address(family), own)
    primary = next(filter(partial(_is_reachable, family), sorted(network.addresses)), "")
    interfaces = {route.interface for route in network.routes} - {"", "lo"} or {""}
    for rule in islice(_frontends(rules), _MOST_FRONTENDS):
        address, port = rule.frontend.address, rule.frontend.port
        to = Packet(rule.protocol.lower(), "", primary if address == ANY_LOCAL else address, port)
        outside = rule.frontend.kind is FrontendKind.NODE_PORT
        entrances = [network.interface_to(_OUTSIDE[family])] if outside else sorted(interfaces)
        coming = [
            msgspec.structs.replace(to, received_by=interface, clients=others) for interface in entrances
        ]
        if to.destination:
            yield (
                rule.title or f"{address}:{port}",
                ([msgspec.structs.replace(to, starts_here=True, clients=own)], coming),
            )


def _is_reachable(family: Family, address: str) -> bool:
    """Return whether clients elsewhere can connect to an address of the node."""
    ip = ipaddress.ip_address(address)
    return family_of(address) is family and not (ip.is_loopback or ip.is_link_local)


def _frontends(rules: NodeRules) -> Iterator[FrontendRule]:
    """Yield what a service proxy serves in either mode."""
    yield from serving_rules(rules.ruleset)
    yield from (
        (rule for rule in nft_frontends(rules.nftables) if nft_title(rule.target)) if rules.nftables else ()
    )


def stopping(rules: Sequence[RuleSet], packet: Packet, network: NodeNetwork) -> set[Step]:
    """Return the rules that stop most clients, without their reasons."""
    shares: dict[Step, float] = {}
    for end in walk(rules, packet, network, record=True).ends:
        if end.step:
            step = msgspec.structs.replace(end.step, reason="")
            part = _size(end.packet.clients) / _size(packet.clients)
            shares[step] = shares.get(step, 0.0) + end.probability * part
    return {step for step, share in shares.items() if share > _MOST_CLIENTS}


def _size(clients: Addresses) -> int:
    return sum(last - first + 1 for first, last in clients)
