"""What changes for clients if a node changes the mode of its kube-proxy: from its rules, and what each mode serves.

docs/differences.md lists the differences of the modes with their places in the source of kube-proxy.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

import msgspec

from pykubeproxy.inspect.check.firewalls import packets_to_services, stopping
from pykubeproxy.inspect.check.report import Check, Finding
from pykubeproxy.inspect.dump.nftables import nft_frontends
from pykubeproxy.inspect.limit import TooManyRules
from pykubeproxy.inspect.node import NodeState, UnknownNode
from pykubeproxy.inspect.packets.addresses import contains
from pykubeproxy.inspect.packets.packet import DNAT, LOOPBACK, SNAT, Packet
from pykubeproxy.inspect.packets.rule_set import RuleSet
from pykubeproxy.inspect.packets.walk import Step, walk
from pykubeproxy.inspect.routes import FrontendRule, PacketVerdict, rejecting_rules, serving_rules
from pykubeproxy.objects import Family, Node, Service, address_and_port, of_family
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.inferred import inferred_settings
from pykubeproxy.rules.iptables_save import parse_rule, parse_target
from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.ports import FrontendKind
from pykubeproxy.wording import counted, listed

NFTABLES, IPTABLES, IPVS = "nftables", "iptables", "ipvs"
MODES = (NFTABLES, IPTABLES)
PRIMARY = "primary"
_MOST_NAMED = 10
_LOCALHOST = "127.0.0.1"
# Those that kube-proxy requires: the kernel by itself, nft by its library knftables.
_OLDEST_KERNEL, _OLDEST_NFT = (5, 13), (1, 0, 1)
_NUMBERS = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
_REDHAT = re.compile(r"\.el(\d+)")
# The marks of iptables mode: to masquerade, and of older kubelets to drop.
_MARKS = re.compile(r"mark 0x(?:4000|8000)\b")
_MASQUERADE = 0x4000
_TRACE = "`pykubeproxy trace` shows the way of a packet."


class Migration(msgspec.Struct, frozen=True):
    """A change of mode.

    - `to`: the new mode
    - `node_port_addresses`: the setting nodePortAddresses afterwards, CIDRs or "primary"; empty for the present one
    - `services`: those of the cluster, by which node ports of ipvs mode are known
    """

    to: str
    node_port_addresses: Sequence[str] = ()
    services: Sequence[Service] = ()


def migration(wanted: Migration, state: NodeState | UnknownNode) -> Iterator[Finding]:
    """Check what clients notice: "fail" if something stops working, "warn" if something else changes."""
    mode = _mode(state)
    check = Check("mode")
    if not mode:
        reason = state.reason if isinstance(state, UnknownNode) else "has no rules of a service proxy"
        yield check.skip(f"what a change of mode does is unknown: the node {reason}")
        return
    if mode == wanted.to:
        yield check.ok(f"the node is in {mode} mode already")
        return
    yield check.ok(f"the node is in {mode} mode")
    yield from _kernel(wanted.to, state.node.kernel)
    if isinstance(state, UnknownNode):
        yield from _from_ipvs(wanted, state.node)
        return
    for family in state.rules:
        try:
            yield from _of_family(wanted, state, family)
        except TooManyRules as error:
            yield Check("mode", family).skip(str(error))


def _of_family(wanted: Migration, state: NodeState, family: Family) -> Iterator[Finding]:
    rules = state.rules[family]
    frontends = [*serving_rules(rules.ruleset), *rejecting_rules(rules.ruleset)]
    if state.in_nftables_mode:
        frontends = list(nft_frontends(rules.nftables)) if rules.nftables else []
    if frontends:
        yield from _node_ports(wanted, state, family, frontends)
        yield from _clients(wanted.to, family, frontends)
        if wanted.to == NFTABLES:
            yield from _foreign(rules.ruleset)
            yield from _forwarding(family, state)


def nft_version(printed: str) -> Finding:
    """Check the nft of the node by what `nft --version` prints."""
    check, version = Check("nft"), _numbers(printed)
    if not version:
        return check.skip("the version of nft on the node is unknown", "kube-proxy requires 1.0.1.")
    text = ".".join(map(str, version))
    if version < _OLDEST_NFT:
        return check.fail(
            f"nft {text} of the node is older than 1.0.1",
            "It may not read the rules of kube-proxy. Update it first.",
        )
    return check.ok(f"nft {text} can read the rules of kube-proxy")


def _mode(state: NodeState | UnknownNode) -> str:
    if isinstance(state, UnknownNode):
        return IPVS if state.mode == IPVS else ""
    if state.in_nftables_mode:
        return NFTABLES
    return (
        IPTABLES if any(skeleton.NAT_SERVICES in one.ruleset.chains for one in state.rules.values()) else ""
    )


def _numbers(text: str) -> tuple[int, ...]:
    found = _NUMBERS.search(text)
    return tuple(int(part or 0) for part in found.groups()) if found else ()


def _kernel(to: str, release: str) -> Iterator[Finding]:
    check = Check("kernel")
    if to == IPTABLES:
        redhat = _REDHAT.search(release)
        if redhat and int(redhat[1]) >= 10:
            yield check.warn(
                f"kernel {release} may lack the modules of iptables, which RHEL 10 deprecates: kernel-modules-extra has them",
                "Install kernel-modules-extra on the node, or stay in nftables mode.",
            )
    elif not (version := _numbers(release)):
        yield check.skip(
            "the version of the kernel is unknown", "kube-proxy requires 5.13 for nftables mode."
        )
    elif version < _OLDEST_KERNEL:
        yield check.fail(
            f"kernel {release} is older than 5.13, so kube-proxy does not start in nftables mode",
            "Update the kernel first.",
        )
    else:
        yield check.ok(f"kernel {release} has what nftables mode needs")


def _from_ipvs(wanted: Migration, node: Node) -> Iterator[Finding]:
    check = Check("ipvs")
    yield check.warn(
        "addresses of Services are bound to interface kube-ipvs0 and answer ping, which they do not do afterwards",
        "Let monitoring connect to a port of the Service instead.",
    )
    yield check.warn(
        "the scheduler of IPVS has no effect afterwards: each connection gets an endpoint by chance",
        "Test Services that depend on a scheduler such as least connections.",
    )
    if wanted.to == IPTABLES:
        yield check.fail(
            "kube-proxy in iptables mode leaves the virtual servers of ipvs mode, which take precedence over its rules",
            "Run `kube-proxy --cleanup` on the node before it changes, or restart the node.",
        )
        return
    for family in Family:
        titles = [
            f"{service.key} ({port.node_port})"
            for service in wanted.services
            for port in service.ports
            if port.node_port and of_family(service.cluster_ips, family)
        ]
        own = of_family(node.addresses, family)
        kept = _kept(wanted, node, family, own, ())
        if titles:
            unknown = not wanted.node_port_addresses
            yield from _lost(family, titles, [one for one in own if one not in kept], kept, unknown=unknown)


def _node_ports(
    wanted: Migration, state: NodeState, family: Family, frontends: Sequence[FrontendRule]
) -> Iterator[Finding]:
    """Compare the addresses at which node ports are served now and afterwards."""
    found = [one for one in frontends if one.frontend.kind is FrontendKind.NODE_PORT and _has_endpoints(one)]
    if not found:
        return
    titles = list(dict.fromkeys(f"{one.title or one.target} ({one.frontend.port})" for one in found))
    loopback = {_LOCALHOST} if family is Family.IPV4 else set[str]()
    own = dict.fromkeys((*of_family(sorted(state.network.addresses), family), *loopback))
    # Clients on other machines do not use addresses of the link.
    reachable = [one for one in own if not one.startswith(("fe80:", "169.254.")) and one != "::1"]
    rules = state.rules[family].rule_sets
    now = [address for address in reachable if _is_served(rules, found[0], address, state)]
    present = {one: _chosen_addresses(rules.ruleset) for one, rules in state.rules.items()}
    everywhere = not present[family]
    # Without routes, only the Node's addresses are known.
    known = state.network.routes and of_family(state.node.addresses, family)
    unknown = everywhere and not known and not wanted.node_port_addresses
    if wanted.to == NFTABLES:
        # With nodePortAddresses of the other family only, kube-proxy serves all addresses of this one.
        chosen = present[family] or (reachable if any(present.values()) else ())
        kept = _kept(wanted, state.node, family, reachable, chosen)
        certain = wanted.node_port_addresses or kept
        lost = [one for one in now if one not in kept and (certain or one == _LOCALHOST)]
        yield from _lost(family, titles, lost, kept, unknown=unknown)
        return
    served = reachable
    if wanted.node_port_addresses:
        served = [*_kept(wanted, state.node, family, reachable, ())]
    if gained := [one for one in served if one not in now]:
        yield Check("node-ports", family).warn(
            f"node ports are served at {listed(gained, _MOST_NAMED)} too: {listed(titles, _MOST_NAMED)}",
            "If clients must not reach them there, set nodePortAddresses, or for 127.0.0.1 iptables.localhostNodePorts:"
            " false, before the change.",
        )


def _kept(
    wanted: Migration, node: Node, family: Family, own: Sequence[str], present: Sequence[str]
) -> Collection[str]:
    """Return the addresses whose node ports nftables mode serves; `present` are those of nodePortAddresses now."""
    primary = of_family(node.addresses, family)[:1]
    networks = of_family(wanted.node_port_addresses, family)
    if wanted.node_port_addresses and PRIMARY not in wanted.node_port_addresses:
        # Without one of the family, kube-proxy serves all addresses.
        chosen = [one for one in own if not networks or any(contains(network, one) for network in networks)]
    else:
        chosen = [*(present or primary)]
    return {one for one in chosen if not any(contains(network, one) for network in LOOPBACK)}


def _lost(
    family: Family, titles: Sequence[str], lost: Sequence[str], kept: Collection[str], *, unknown: bool
) -> Iterator[Finding]:
    check = Check("node-ports", family)
    serves, ports = listed(sorted(kept)) or "the primary address of the node", listed(titles, _MOST_NAMED)
    if elsewhere := [one for one in lost if one != _LOCALHOST]:
        yield check.fail(
            f"node ports are not served at {listed(elsewhere, _MOST_NAMED)} in nftables mode: {ports}",
            f"Let clients use {serves}, or set nodePortAddresses to the networks of these addresses, and check that with"
            " --nodeport-addresses.",
        )
    elif unknown:
        yield check.warn(
            f"node ports are served at {serves} only in nftables mode, at all addresses of the node now: {ports}",
            "The other addresses of the node are unknown here: if clients use them, set nodePortAddresses.",
        )
    if _LOCALHOST in lost:
        yield check.fail(
            f"node ports are not served at {_LOCALHOST} in nftables mode, whatever its settings: {ports}",
            f"Let programs on the node use {serves}. To see before whether any notices, set iptables.localhostNodePorts:"
            " false.",
        )
    if not elsewhere and not unknown and _LOCALHOST not in lost:
        yield check.ok(f"node ports stay served at {serves}")


def _chosen_addresses(ruleset: Ruleset) -> Sequence[str]:
    """Return the addresses that nodePortAddresses selects; none if node ports are served at all of the node."""
    settings = inferred_settings(ruleset)
    return (
        [*filter(None, (parse_rule(jump).destination for jump in settings.node_port_jumps))]
        if settings
        else ()
    )


def _is_served(rules: Sequence[RuleSet], one: FrontendRule, address: str, state: NodeState) -> bool:
    """Return whether rules translate what the node sends to a node port at one of its addresses."""
    packet = Packet(one.protocol.lower(), address, address, one.frontend.port, starts_here=True)
    ends = walk(rules, packet, state.network).ends
    return any(end.verdict is PacketVerdict.DNAT for end in ends)


def _has_endpoints(one: FrontendRule) -> bool:
    return one.target not in ("REJECT", "DROP")


def _clients(to: str, family: Family, frontends: Sequence[FrontendRule]) -> Iterator[Finding]:
    """Report packets that one mode rejects or drops, and the other one lets pass."""
    kinds = FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER_IP
    cluster_ips = {one.frontend.address for one in frontends if one.frontend.kind is FrontendKind.CLUSTER_IP}
    rejected = {
        f"{one.title} ({address_and_port(one.frontend.address, one.frontend.port)})": None
        for one in frontends
        if one.frontend.kind in kinds and one.target == "REJECT"
    }
    stopped, passing = "rejected", "pass"
    now, then = (passing, stopped) if to == NFTABLES else (stopped, passing)
    if cluster_ips:
        ips = counted(len(cluster_ips), "cluster IP")
        yield Check("other-ports", family).warn(
            f"packets to ports of {ips} that no Service has: {now} now, {then} afterwards",
            "The same holds for unused addresses of the Service CIDR, which nftables mode drops if the cluster has"
            " ServiceCIDR objects. Clients that try such addresses get another error.",
        )
    if rejected:
        yield Check("external-ips", family).warn(
            f"packets of the node itself to addresses of Services without endpoints: {now} now, {then} afterwards:"
            f" {listed(rejected, _MOST_NAMED)}",
            "Give these Services endpoints, or let programs of the node not use them.",
        )


def _foreign(ruleset: Ruleset) -> Iterator[Finding]:
    """Report rules of other programs that need the chains or marks of iptables mode."""
    check = Check("foreign-rules", ruleset.family)
    found = False
    for key, rules in ruleset.chains.items():
        for rule in rules:
            where = f"in chain {key.chain} of table {key.table}: {rule}"
            if is_ours(key):
                if not _is_of_proxy(key, rule):
                    yield check.fail(
                        f"a rule that is not the proxy's goes with its chain, {where}",
                        "Move it to a chain of your own, or to a table of nftables with a priority of its own.",
                    )
                    found = True
            elif key.chain.startswith("KUBE-") or _is_jump(key, rule):
                continue
            elif is_ours(ChainKey(key.table, parse_target(rule))):
                yield check.fail(
                    f"a rule refers to a chain of the proxy, {where}",
                    "kube-proxy cannot delete this chain, so its old rules stay and act on packets. Remove the rule"
                    " before the change.",
                )
                found = True
            elif _MARKS.search(rule):
                yield check.warn(
                    f"a rule depends on the marks of iptables mode, {where}",
                    "In nftables mode they are no interface for others. Let the rule use a condition of its own.",
                )
                found = True
    if not found:
        yield check.ok("no rules of other programs need the chains of the proxy")


def _is_jump(key: ChainKey, rule: str) -> bool:
    """Return whether a rule in a built-in chain is a jump of a service proxy, of any version."""
    return rule in skeleton.JUMPS.get(key, ()) or parse_rule(rule).comment.startswith("kubernetes ")


def _is_of_proxy(key: ChainKey, rule: str) -> bool:
    """Return whether service proxies write such rules in their chains."""
    parsed = parse_rule(rule)
    if parsed.target.startswith("KUBE-") or "INVALID" in parsed.options.get("--ctstate", ""):
        return True
    if key.table == "filter":
        return bool(parsed.title) or parsed.comment.startswith("kubernetes ")
    if not parsed.target or names.is_endpoint_chain(key.chain):
        return parsed.target in ("DNAT", "")
    return key.chain in (names.POSTROUTING, names.MARK_MASQ) and parsed.target in (
        "RETURN",
        "MARK",
        "MASQUERADE",
    )


def _forwarding(family: Family, state: NodeState) -> Iterator[Finding]:
    """Report rules that stop service traffic once no rule of iptables mode accepts it before them."""
    rules = state.rules[family]
    before = rules.rule_sets
    after = msgspec.structs.replace(rules, ruleset=_without_proxy(rules.ruleset)).rule_sets
    stopped: dict[Step, dict[str, None]] = {}
    for title, ways in packets_to_services(family, rules, state.network):
        for packet in (packet for packets in ways for packet in packets):
            reached = {
                end.packet: None
                for end in walk(before, packet, state.network).ends
                if DNAT in end.packet.states
            }
            for there in islice(reached, 1):
                translated = msgspec.structs.replace(
                    packet,
                    destination=there.destination,
                    port=there.port,
                    states=(*packet.states, DNAT),
                    mark=_MASQUERADE if SNAT in there.states else 0,
                )
                for step in stopping(after, translated, state.network):
                    stopped.setdefault(step, {})[title] = None
    for step, titles in stopped.items():
        yield Check("firewall", family).fail(
            f"chain {step.chain} of table {step.table} {step.does}s packets to {listed(titles, _MOST_NAMED)} in nftables"
            f" mode, as no rule of kube-proxy accepts them before: {step.rule}",
            f"Insert a rule that accepts `-m conntrack --ctstate DNAT` in this chain before the change. {_TRACE}",
        )


def _without_proxy(ruleset: Ruleset) -> Ruleset:
    """Return the rules that stay when the proxy has deleted its own."""
    chains = {
        key: tuple(rule for rule in rules if not is_ours(ChainKey(key.table, parse_target(rule))))
        for key, rules in ruleset.chains.items()
        if not is_ours(key)
    }
    return msgspec.structs.replace(ruleset, chains=chains)
