"""The fixed chains and jumps: how packets enter the proxy chains and are marked, masqueraded and forwarded."""

from pykubeproxy.objects import Family
from pykubeproxy.rules import names
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.rules.text import rule

# nfacct objects: packets dropped as INVALID, and packets to node ports on 127.0.0.0/8.
INVALID_DROPPED = "ct_state_invalid_dropped_pkts"
LOCALHOST_ACCEPTED = "localhost_nps_accepted_pkts"
NFACCT_NAMES = (INVALID_DROPPED, LOCALHOST_ACCEPTED)

# Chains with entries of many services, rendered by dispatch.py.
NAT_SERVICES = ChainKey("nat", names.SERVICES)
NAT_NODEPORTS = ChainKey("nat", names.NODEPORTS)
FILTER_SERVICES = ChainKey("filter", names.SERVICES)
FILTER_EXTERNAL = ChainKey("filter", names.EXTERNAL_SERVICES)
FILTER_NODEPORTS = ChainKey("filter", names.NODEPORTS)
FILTER_FIREWALL = ChainKey("filter", names.PROXY_FIREWALL)
SHARED = (FILTER_SERVICES, FILTER_EXTERNAL, FILTER_NODEPORTS, FILTER_FIREWALL, NAT_SERVICES, NAT_NODEPORTS)

# Empty chains: a missing one means that the table was flushed.
CANARIES = tuple(ChainKey(table, names.CANARY) for table in ("mangle", "nat", "filter"))

# The chains of kube-proxy's ipvs mode only; it shares others with iptables mode.
IPVS_CHAINS = frozenset(
    {
        ChainKey("nat", "KUBE-NODE-PORT"),
        ChainKey("nat", "KUBE-LOAD-BALANCER"),
        ChainKey("filter", "KUBE-NODE-PORT"),
        ChainKey("filter", "KUBE-SOURCE-RANGES-FIREWALL"),
        ChainKey("filter", "KUBE-IPVS-FILTER"),
        ChainKey("filter", "KUBE-IPVS-OUT-FILTER"),
    }
)
# The comments of jumps that only ipvs mode has in built-in chains.
IPVS_COMMENTS = frozenset(
    {"kubernetes health check rules", "kube-proxy firewall rules", "kubernetes ipvs access filter"}
)

_FORWARD = ChainKey("filter", names.FORWARD)
_POSTROUTING = ChainKey("nat", names.POSTROUTING)
_MARK_MASQ = ChainKey("nat", names.MARK_MASQ)
FIXED = (*CANARIES, _FORWARD, _POSTROUTING, _MARK_MASQ)

KUBELET_FIREWALL = ChainKey("filter", names.KUBELET_FIREWALL)

_NEW = "-m conntrack --ctstate NEW"


def nfacct_match(name: str) -> str:
    """Return a match that counts packets in an nfacct object."""
    return f"-m nfacct --nfacct-name {name}"


def _jump(chain: str, comment: str = "", match: str = "") -> str:
    # Here the match precedes the comment, as in kube-proxy's jumps.
    quoted = f'-m comment --comment "{comment}"' if comment else ""
    return rule(match, quoted, target=chain)


_LOAD_BALANCER_FIREWALL = _jump(names.PROXY_FIREWALL, "kubernetes load balancer firewall", _NEW)
_SERVICE_PORTALS = _jump(names.SERVICES, "kubernetes service portals", _NEW)
_EXTERNAL_PORTALS = _jump(names.EXTERNAL_SERVICES, "kubernetes externally-visible service portals", _NEW)
KUBELET_FIREWALL_JUMP = _jump(names.KUBELET_FIREWALL)
# Node ports on 127.0.0.0/8 need route_localnet, which exposes this node's loopback services to its network without this
# rule (CVE-2020-8558).
LOOPBACK_GUARD = rule(
    "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT",
    source="! 127.0.0.0/8",
    destination="127.0.0.0/8",
    comment="block incoming localnet connections",
    target="DROP",
)

# The first rules of the built-in chains, in this order.
JUMPS: dict[ChainKey, tuple[str, ...]] = {
    ChainKey("filter", "INPUT"): (
        KUBELET_FIREWALL_JUMP,
        _LOAD_BALANCER_FIREWALL,
        _jump(names.NODEPORTS, "kubernetes health check service ports"),
        _EXTERNAL_PORTALS,
    ),
    ChainKey("filter", "FORWARD"): (
        _LOAD_BALANCER_FIREWALL,
        _jump(names.FORWARD, "kubernetes forwarding rules"),
        _SERVICE_PORTALS,
        _EXTERNAL_PORTALS,
    ),
    ChainKey("filter", "OUTPUT"): (KUBELET_FIREWALL_JUMP, _LOAD_BALANCER_FIREWALL, _SERVICE_PORTALS),
    ChainKey("nat", "PREROUTING"): (_jump(names.SERVICES, "kubernetes service portals"),),
    ChainKey("nat", "OUTPUT"): (_jump(names.SERVICES, "kubernetes service portals"),),
    ChainKey("nat", "POSTROUTING"): (_jump(names.POSTROUTING, "kubernetes postrouting rules"),),
}


def fixed_chains(options: RuleOptions) -> dict[ChainKey, tuple[str, ...]]:
    """Return the chains whose rules depend on no service, including the canaries."""
    return {
        **dict.fromkeys(CANARIES, ()),
        _FORWARD: _forward(options),
        _POSTROUTING: _postrouting(options),
        _MARK_MASQ: (rule(target=f"MARK --set-xmark {options.mark}"),),
    }


def kubelet_firewall(options: RuleOptions) -> tuple[str, ...]:
    """Return the rules that KUBE-FIREWALL must contain besides those of the kubelet."""
    return (LOOPBACK_GUARD,) if options.family is Family.IPV4 and options.localhost_node_ports else ()


def _forward(options: RuleOptions) -> tuple[str, ...]:
    """Accept service traffic even if the policy of FORWARD is DROP.

    Drop INVALID packets: they would leave without reverse NAT and reset the connection (kubernetes#74839).
    """
    counted = nfacct_match(INVALID_DROPPED) if options.nfacct else ""
    drop = (rule("-m conntrack --ctstate INVALID", counted, target="DROP"),) if options.drop_invalid else ()
    return (
        *drop,
        rule(f"-m mark --mark {options.mark}", comment="kubernetes forwarding rules", target="ACCEPT"),
        rule(
            "-m conntrack --ctstate RELATED,ESTABLISHED",
            comment="kubernetes forwarding conntrack rule",
            target="ACCEPT",
        ),
    )


def _postrouting(options: RuleOptions) -> tuple[str, ...]:
    """Masquerade marked packets, and clear the mark because a packet may pass again inside a tunnel."""
    return (
        rule(f"-m mark ! --mark {options.mark}", target="RETURN"),
        rule(target=f"MARK --set-xmark {1 << options.masquerade_bit:#x}/0x0"),
        rule(
            comment="kubernetes service traffic requiring SNAT",
            target="MASQUERADE --random-fully" if options.random_fully else "MASQUERADE",
        ),
    )
