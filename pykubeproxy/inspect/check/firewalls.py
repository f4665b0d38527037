"""Check that tables of nftables, such as those of firewalls, let packets to Services pass."""

from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from pykubeproxy.inspect.check.report import Check, Finding
from pykubeproxy.inspect.limit import TooManyRules
from pykubeproxy.inspect.node import NodeRules
from pykubeproxy.inspect.packets.addresses import Addresses, every_address, subtract
from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.inspect.packets.rule_set import RuleSet
from pykubeproxy.inspect.packets.walk import Step, walk
from pykubeproxy.inspect.routes import serving_rules
from pykubeproxy.objects import Family, family_of
from pykubeproxy.rules.names import NFT_TABLES, nft_title
from pykubeproxy.rules.nft_list import NftRuleset
from pykubeproxy.services.ports import ANY_LOCAL
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
    tables = [name for name in rules.nftables.tables() if name not in NFT_TABLES] if rules.nftables else []
    if not tables:
        return
    stopped: dict[Step, dict[str, None]] = {}
    packets_sent = list(_packets(family, rules, network))
    try:
        for title, ways in packets_sent:
            for packets in ways:
                for step in set.intersection(*(_stopping(rules.rule_sets, one, network) for one in packets)):
                    if step.table in tables:
                        stopped.setdefault(step, {})[title] = None
    except TooManyRules as error:
        yield check.skip(str(error))
        return
    for step, titles in stopped.items():
        what = f"{step.does}s packets to {listed(titles, _MOST_NAMED)}"
        yield check.warn(f"chain {step.chain} of nftables table {step.table} {what}: {step.rule}", _ADVICE)
    if packets_sent and not stopped:
        yield check.ok(f"packets to Services pass nftables {listed(tables)}")


def _packets(
    family: Family, rules: NodeRules, network: NodeNetwork
) -> Iterator[tuple[str, Sequence[Sequence[Packet]]]]:
    """Yield frontends with packets to them: those of the node, and those of others by each interface."""
    own = network.own_addresses(family)
    others = subtract(every_address(family), own)
    primary = next((one for one in sorted(network.addresses) if family_of(one) is family), "")
    interfaces = {route.interface for route in network.routes} - {"", "lo"} or {""}
    for title, protocol, address, port in islice(_frontends(rules), _MOST_FRONTENDS):
        to = Packet(protocol.lower(), "", primary if address == ANY_LOCAL else address, port)
        entrances = [network.interface_to(_OUTSIDE[family])] if address == ANY_LOCAL else sorted(interfaces)
        coming = [
            msgspec.structs.replace(to, received_by=interface, clients=others) for interface in entrances
        ]
        if to.destination:
            yield (
                title or f"{address}:{port}",
                ([msgspec.structs.replace(to, starts_here=True, clients=own)], coming),
            )


def _frontends(rules: NodeRules) -> Iterator[tuple[str, str, str, int]]:
    """Yield titles, protocols, addresses and ports of what a service proxy serves in either mode."""
    for rule in serving_rules(rules.ruleset):
        yield rule.title, rule.protocol, rule.frontend.address, rule.frontend.port
    yield from _nft_frontends(rules.nftables) if rules.nftables else ()


def _nft_frontends(ruleset: NftRuleset) -> Iterator[tuple[str, str, str, int]]:
    """Yield titles, protocols, addresses and ports of what a kube-proxy in nftables mode serves."""
    for key, elements in ruleset.sets.items():
        if key.table in NFT_TABLES and key.name in ("service-ips", "service-nodeports"):
            for element in elements.elements:
                match element:
                    case [{"concat": [*address, str(protocol), int(port)]}, {"goto": {"target": str(chain)}}]:
                        yield nft_title(chain), protocol, str(*address) or ANY_LOCAL, port


def _stopping(rules: Sequence[RuleSet], packet: Packet, network: NodeNetwork) -> set[Step]:
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
