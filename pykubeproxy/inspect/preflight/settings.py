"""Kernel settings that services depend on, judged by their values; None stands for a setting that is not there."""

from collections.abc import Mapping, Sequence

from pykubeproxy.inspect.preflight.finding import Finding, fail, number, ok, several, skip, warn
from pykubeproxy.objects import Family

Range = tuple[int, int]
"""The first and the last port."""

_FORWARDING = {Family.IPV4: "net.ipv4.ip_forward", Family.IPV6: "net.ipv6.conf.all.forwarding"}
_CALL = {
    Family.IPV4: "net.bridge.bridge-nf-call-iptables",
    Family.IPV6: "net.bridge.bridge-nf-call-ip6tables",
}
_STRICT = "1"
_TIGHT, _FULL = 0.8, 0.98


def forwarding(family: Family, value: str | None, needed: bool) -> Finding:
    """Whether the node passes packets on, between its pods and other nodes; not `needed` where nobody has addresses."""
    name, check = _FORWARDING[family], "forwarding"
    if value not in (None, "0"):
        return ok(check, f"{family.value} packets are forwarded", family)
    if not needed:
        return ok(check, f"{family.value} is not forwarded, and the node has no use for it", family)
    if value is None:
        text = f"the kernel has no {family.value} here ({name} is missing)"
        return fail(
            check, text, f"Enable {family.value} in the kernel, or have the cluster go without it.", family
        )
    text = f"{family.value} packets are not forwarded ({name} = 0): pods are cut off"
    return fail(check, text, f"{_set(name, '1')}.", family)


def reverse_path(effective: Mapping[str, str]) -> Finding:
    """Strict filtering of sources, by interface; only those are given by which packets may come from elsewhere.

    With one such interface there is no other way for answers to take.
    """
    check = "rp-filter"
    strict = sorted(name for name, value in effective.items() if value == _STRICT)
    if not strict:
        return ok(check, "no uplink filters sources strictly")
    if len(effective) == 1:
        return ok(check, f"{strict[0]} filters sources strictly, which is harmless on an only uplink")
    text = f"sources are filtered strictly on {several(strict)}"
    what = "Answers that come in by another interface than the way back are dropped."
    return warn(
        check, text, f"{what} {_set('net.ipv4.conf.all.rp_filter', '2')} (loose) if nodes have several ways."
    )


def bridged(family: Family, bridges: Sequence[str], pods: str, value: str | None) -> Finding:
    """Whether iptables sees what passes between ports of a bridge; `pods` is the pods' bridge if the flags name it."""
    name, check = _CALL[family], "br-netfilter"
    if not bridges:
        return ok(check, "there is no bridge", family)
    if value == "1":
        return ok(check, f"iptables sees what passes within {several(bridges)}", family)
    how = (
        "Load br_netfilter with modprobe and see to it that it is loaded at each start."
        if value is None
        else f"{_set(name, '1')}."
    )
    what = "the module br_netfilter is not loaded" if value is None else f"{name} = {value}"
    text = f"iptables does not see what passes within a bridge ({what})"
    if pods in bridges:
        return fail(check, text, f"Pods on {pods} cannot reach one another by a service. {how}", family)
    advice = f"If {several(bridges)} joins pods, these cannot reach one another by a service. {how}"
    return warn(check, text, advice, family)


def connections(count: str | None, most: str | None) -> Finding:
    """Room in the table of connections: when it is full, new ones are dropped."""
    check = "conntrack"
    if count is None or most is None:
        text = "connections are not tracked yet (the module nf_conntrack is not loaded)"
        return skip(check, text, "The agent's rules load it.")
    used, limit = int(count), int(most)
    if not limit:
        return ok(check, f"{number(used, 'connection')} tracked, without a limit")
    share = used / limit
    text = f"{number(used, 'connection')} of {limit} tracked ({100 * share:.0f}%)"
    if share < _TIGHT:
        return ok(check, text)
    advice = f"Raise net.netfilter.nf_conntrack_max, or --conntrack-max-per-core, to {2 * limit} in all."
    if share < _FULL:
        return warn(check, text, f"When the table is full, new connections are dropped. {advice}")
    return fail(check, text, f"The table is full: new connections are dropped. {advice}")


def node_ports(wanted: Range, local: str | None, reserved: str | None) -> Finding:
    """Whether the node may take a node port for a connection of its own.

    `local` and `reserved` are as in net.ipv4.ip_local_port_range ("32768 60999") and ip_local_reserved_ports
    ("30000-32767,40000").
    """
    check, span = "node-ports", f"{wanted[0]}-{wanted[1]}"
    if local is None:
        return skip(check, "the range of local ports is not known (net.ipv4.ip_local_port_range)")
    first, last = map(int, local.split())
    begin, end = max(first, wanted[0]), min(last, wanted[1])
    if begin > end:
        return ok(check, f"node ports {span} are apart from local ports {first}-{last}")
    if not _uncovered(begin, end, reserved or ""):
        return ok(check, f"node ports {span} are reserved among local ports {first}-{last}")
    text = f"local ports {first}-{last} overlap with node ports {span}"
    advice = (
        "The kernel may give a program of the node's own a port that leads to a Service."
        f" {_set('net.ipv4.ip_local_reserved_ports', _joined(reserved, span))}, or move ip_local_port_range."
    )
    return warn(check, text, advice)


def _uncovered(begin: int, end: int, reserved: str) -> bool:
    """Whether a port from begin to end is in none of the reserved ranges, which the kernel sorts."""
    for part in filter(None, reserved.split(",")):
        first, _, last = part.partition("-")
        if int(first) <= begin:
            begin = max(begin, int(last or first) + 1)
    return begin <= end


def _joined(reserved: str | None, span: str) -> str:
    return f"{reserved},{span}" if reserved else span


def _set(name: str, value: str) -> str:
    return f"Set {name} = {value}"
