"""The rules of older versions of kube-proxy for the same objects, in the form that iptables-save prints.

Written from what those versions program. Up to 1.23, masquerading is decided in KUBE-SERVICES and KUBE-NODEPORTS, and
policy Local has chains KUBE-XLB-…; from 1.24 on there are chains KUBE-EXT-…. Up to 1.25, packets to drop are marked for the
kubelet's KUBE-FIREWALL; later, KUBE-PROXY-FIREWALL drops them. Older versions know no nfacct objects.
"""

import enum
import re
from collections.abc import Iterator

import msgspec

from pykubeproxy.rules import names
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.render import installed, render
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import ServicePort
from pykubeproxy.services.selection import ResolvedPort

_MARK_DROP = "KUBE-MARK-DROP"
_NEW = "-m conntrack --ctstate NEW "


class Form(enum.Enum):
    """The oldest version of kube-proxy whose rules have a form."""

    V1_22 = "v1.22.17"
    V1_25 = "v1.25.16"
    V1_30 = "v1.30.8"
    V1_36 = "v1.36.0"


def rules_in_form(form: Form, cluster: Cluster, context: RuleContext) -> Ruleset:
    """Return the tables of a node whose kube-proxy is of a version of this form."""
    options = context.options
    if form is not Form.V1_36:
        options = msgspec.structs.replace(options, nfacct=False)
        context = msgspec.structs.replace(context, options=options)
    current = installed(render(cluster, context), options)
    match form:
        case Form.V1_22:
            return _v1_22(current, cluster, context)
        case Form.V1_25:
            return _with_kubelet(_v1_25(current), options)
        case _:
            return current


def _with_kubelet(rules: Ruleset, options: RuleOptions) -> Ruleset:
    """Add what the kubelet writes: the rules that drop marked packets."""
    chains = dict(rules.chains)
    guard = chains.get(ChainKey("filter", "KUBE-FIREWALL"), ())
    drop = '-m comment --comment "kubernetes firewall for dropping marked packets" -m mark --mark 0x8000/0x8000 -j DROP'
    chains[ChainKey("filter", "KUBE-FIREWALL")] = (drop, *guard)
    chains[ChainKey("nat", _MARK_DROP)] = ("-j MARK --set-xmark 0x8000/0x8000",)
    chains.pop(ChainKey("filter", "KUBE-PROXY-FIREWALL"), None)
    chains = {
        key: tuple(it for it in some if not it.endswith("-j KUBE-PROXY-FIREWALL"))
        for key, some in chains.items()
    }
    if options.drop_invalid:
        # Versions before 1.24 also accept replies by network.
        forward = ChainKey("filter", "KUBE-FORWARD")
        replies = tuple(
            f"-{side} 10.244.0.0/16 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT" for side in "sd"
        )
        chains[forward] = (*chains[forward], *(replies if not options.ipv6 else ()))
    return Ruleset(rules.family, chains)


def _v1_25(current: Ruleset) -> Ruleset:
    """Mark packets to drop at the end of a chain in place of dropping them in table filter."""
    chains = dict(current.chains)
    for key, rules in current.chains.items():
        if key.chain.startswith("KUBE-FW-"):
            kept = tuple(it for it in rules if "-j " in it)
            chains[key] = (*kept, f'-m comment --comment "other traffic" -j {_MARK_DROP}')
        elif key.chain.startswith("KUBE-EXT-") and not re.search(r"-j KUBE-SV[CL]-\w+$", rules[-1]):
            chains[key] = (*rules, f"-j {_MARK_DROP}")
        elif key.chain.startswith("KUBE-EXT-") and "LOCAL traffic" in rules[-1]:
            chains[key] = (*rules, f'-m comment --comment "no local endpoints" -j {_MARK_DROP}')
    external = ChainKey("filter", "KUBE-EXTERNAL-SERVICES")
    chains[external] = tuple(it for it in chains[external] if not it.endswith("-j DROP"))
    return Ruleset(current.family, chains)


def _v1_22(current: Ruleset, cluster: Cluster, context: RuleContext) -> Ruleset:
    """Split the rules otherwise; the chains of endpoints stay."""
    options = context.options
    chains = {
        key: rules
        for key, rules in current.chains.items()
        if not key.chain.startswith(("KUBE-EXT-", "KUBE-FW-", "KUBE-SVL-"))
    }
    for key, rules in chains.items():
        if key.chain.startswith("KUBE-SVC-"):
            chains[key] = tuple(
                re.sub(r" -> [^\"]*", "", it) for it in rules if "-j KUBE-MARK-MASQ" not in it
            )
    external = ChainKey("filter", "KUBE-EXTERNAL-SERVICES")
    chains[external] = tuple(it for it in chains[external] if not it.endswith("-j DROP"))
    services: list[str] = []
    node_ports: list[str] = []
    for service in cluster.services():
        resolved = context.resolve(cluster, service.key)
        assert isinstance(resolved, tuple)
        for port in resolved:
            assert not port.port.internal_local, "1.22 treats internal policy Local otherwise"
            if port.selection.any_usable:
                services += _services(port.port, options)
                node_ports += _node_ports(port.port)
                chains |= {ChainKey("nat", it): tuple(rules) for it, rules in _own(port, current, options)}
    chains[ChainKey("nat", "KUBE-SERVICES")] = (*services, *context.node_port_jumps)
    chains[ChainKey("nat", "KUBE-NODEPORTS")] = tuple(node_ports)
    return _with_kubelet(Ruleset(current.family, chains), options)


def _xlb(port: ServicePort) -> str:
    return names.cluster_chain(port.name).replace("SVC", "XLB")


def _dport(port: ServicePort, number: int, comment: str) -> str:
    protocol = port.protocol.value.lower()
    return f'-p {protocol} -m comment --comment "{port.name}{comment}" -m {protocol} --dport {number}'


def _to(port: ServicePort, address: str, kind: str) -> str:
    width = 128 if ":" in address else 32
    return f"-d {address}/{width} {_dport(port, port.port, f' {kind}')}"


def _not_local(options: RuleOptions) -> str:
    local = options.local_traffic
    assert local is None or local.source, "local traffic is told by source"
    return f"! -s {local.source} " if local else ""


def _services(port: ServicePort, options: RuleOptions) -> Iterator[str]:
    svc, masq = names.cluster_chain(port.name), "-j KUBE-MARK-MASQ"
    to = _to(port, port.cluster_ip, "cluster IP")
    if options.masquerade_all:
        yield f"{to} {masq}"
    elif options.local_traffic:
        yield f"{_not_local(options)}{to} {masq}"
    yield f"{to} -j {svc}"
    for address in port.external_ips:
        to = _to(port, address, "external IP")
        if not port.external_local:
            yield f"{_not_local(options)}{to} {masq}"
        yield f"{to} -j {_xlb(port) if port.external_local else svc}"
    for address in port.load_balancer_ips:
        yield f"{_to(port, address, 'loadbalancer IP')} -j {names.firewall_chain(port.name)}"


def _node_ports(port: ServicePort) -> Iterator[str]:
    if not port.node_port:
        return
    to, loopback = _dport(port, port.node_port, ""), "::1/128" if ":" in port.cluster_ip else "127.0.0.0/8"
    if port.external_local:
        yield f"-s {loopback} {to} -j KUBE-MARK-MASQ"
        yield f"{to} -j {_xlb(port)}"
    else:
        yield f"{to} -j KUBE-MARK-MASQ"
        yield f"{to} -j {names.cluster_chain(port.name)}"


def _own(port: ResolvedPort, current: Ruleset, options: RuleOptions) -> Iterator[tuple[str, list[str]]]:
    """Yield the chains for load balancer IPs and for policy Local."""
    service, svc = port.port, names.cluster_chain(port.port.name)
    if service.load_balancer_ips:
        comment = f'-m comment --comment "{service.name} loadbalancer IP"'
        to = _xlb(service) if service.external_local else svc
        mark = [] if service.external_local else [f"{comment} -j KUBE-MARK-MASQ"]
        sources = [""] if service.source_ranges is None else [f"-s {it} " for it in service.source_ranges]
        rules = [f"{source}{comment} -j {to}" for source in sources]
        yield names.firewall_chain(service.name), [*mark, *rules, f"{comment} -j {_MARK_DROP}"]
    if service.external_local and service.externally_accessible:
        local = current.chains.get(ChainKey("nat", names.local_chain(service.name)), ())
        balanced = [it for it in local if "-j KUBE-MARK-MASQ" not in it]
        comment = f'-m comment --comment "for {service.name} LB IP" -m addrtype --src-type LOCAL'
        pods = f"-s {options.local_traffic.source} -j {svc}" if options.local_traffic else ""
        rules = [it for it in (pods, f"{comment} -j KUBE-MARK-MASQ", f"{comment} -j {svc}") if it]
        yield _xlb(service), [*rules, *(balanced or [f"-j {_MARK_DROP}"])]
