"""Checks of kernel settings; the value None means that a setting does not exist."""

from collections.abc import Mapping, Sequence

from pykubeproxy.inspect.preflight.model import Finding, fail, ok, skip, warn
from pykubeproxy.objects import Family
from pykubeproxy.wording import counted, listed

Range = tuple[int, int]
"""The first and the last port."""

_FORWARDING = {Family.IPV4: "net.ipv4.ip_forward", Family.IPV6: "net.ipv6.conf.all.forwarding"}
_CALL = {
    Family.IPV4: "net.bridge.bridge-nf-call-iptables",
    Family.IPV6: "net.bridge.bridge-nf-call-ip6tables",
}
_STRICT = "1"
_HIGH, _FULL = 0.8, 0.98


def forwarding(family: Family, value: str | None, needed: bool) -> Finding:
    """Check that the node forwards packets; `needed` is False if it has no addresses of the family."""
    name, check = _FORWARDING[family], "forwarding"
    if value not in (None, "0"):
        return ok(check, f"{family.value} packets are forwarded", family)
    if not needed:
        return ok(
            check,
            f"{family.value} packets are not forwarded, and the node does not use {family.value}",
            family,
        )
    if value is None:
        message = f"the kernel has no {family.value} here ({name} is missing)"
        return fail(
            check, message, f"Enable {family.value} in the kernel, or run the cluster without it.", family
        )
    message = f"{family.value} packets are not forwarded ({name} = 0), so pods cannot be reached"
    return fail(check, message, f"{_set(name, '1')}.", family)


def reverse_path(effective: Mapping[str, str]) -> Finding:
    """Check the uplinks for strict source filtering, by interface; it is harmless on a single uplink."""
    check = "rp-filter"
    strict = sorted(name for name, value in effective.items() if value == _STRICT)
    if not strict:
        return ok(check, "no uplink filters sources strictly")
    if len(effective) == 1:
        return ok(check, f"{strict[0]} filters sources strictly, which is harmless on the only uplink")
    message = f"sources are filtered strictly on {listed(strict, 4)}"
    effect = "Replies that come in by another interface than the route back are dropped."
    return warn(
        check,
        message,
        f"{effect} {_set('net.ipv4.conf.all.rp_filter', '2')} (loose) if nodes have several paths.",
    )


def bridged(family: Family, bridges: Sequence[str], pods: str, value: str | None) -> Finding:
    """Check that iptables sees packets within a bridge; `pods` is the pod bridge that the flags name, or ""."""
    name, check = _CALL[family], "br-netfilter"
    if not bridges:
        return ok(check, "there is no bridge", family)
    if value == "1":
        return ok(check, f"iptables sees packets within {listed(bridges, 4)}", family)
    how = (
        "Load br_netfilter with modprobe, and at each boot with /etc/modules-load.d."
        if value is None
        else f"{_set(name, '1')}."
    )
    cause = "the module br_netfilter is not loaded" if value is None else f"{name} = {value}"
    message = f"iptables does not see packets within a bridge ({cause})"
    if pods in bridges:
        return fail(
            check, message, f"Pods on {pods} cannot reach one another through a service. {how}", family
        )
    advice = f"If {listed(bridges, 4)} connects pods, they cannot reach one another through a service. {how}"
    return warn(check, message, advice, family)


def connections(count: str | None, limit: str | None) -> Finding:
    """Check that the connection tracking table has free entries; when it is full, new connections are dropped."""
    check = "conntrack"
    if count is None or limit is None:
        message = "connections are not tracked yet (the module nf_conntrack is not loaded)"
        return skip(check, message, "The agent's rules load it.")
    used, most = int(count), int(limit)
    if not most:
        return ok(check, f"{counted(used, 'connection')} tracked, without a limit")
    share = used / most
    message = f"{counted(used, 'connection')} of {most} tracked ({100 * share:.0f}%)"
    if share < _HIGH:
        return ok(check, message)
    advice = f"Raise net.netfilter.nf_conntrack_max, or --conntrack-max-per-core, to {2 * most} in total."
    if share < _FULL:
        return warn(check, message, f"When the table is full, new connections are dropped. {advice}")
    return fail(check, message, f"The table is full: new connections are dropped. {advice}")


def node_ports(required: Range, local: str | None, reserved: str | None) -> Finding:
    """Check that the kernel does not give node ports to local connections.

    `local` and `reserved` are as in net.ipv4.ip_local_port_range ("32768 60999") and ip_local_reserved_ports
    ("30000-32767,40000").
    """
    check, span = "node-ports", f"{required[0]}-{required[1]}"
    if local is None:
        return skip(check, "the range of local ports is unknown (net.ipv4.ip_local_port_range)")
    first, last = map(int, local.split())
    begin, end = max(first, required[0]), min(last, required[1])
    if begin > end:
        return ok(check, f"node ports {span} do not overlap with local ports {first}-{last}")
    if not _uncovered(begin, end, reserved or ""):
        return ok(check, f"node ports {span} are reserved among local ports {first}-{last}")
    message = f"local ports {first}-{last} overlap with node ports {span}"
    joined = f"{reserved},{span}" if reserved else span
    advice = (
        "The kernel may give a local program the port of a Service."
        f" {_set('net.ipv4.ip_local_reserved_ports', joined)}, or move ip_local_port_range."
    )
    return warn(check, message, advice)


def _uncovered(begin: int, end: int, reserved: str) -> bool:
    """Return whether a port from begin to end is in none of the reserved ranges, which the kernel sorts."""
    for part in filter(None, reserved.split(",")):
        first, _, last = part.partition("-")
        if int(first) <= begin:
            begin = max(begin, int(last or first) + 1)
    return begin <= end


def _set(name: str, value: str) -> str:
    return f"Set {name} = {value}"
