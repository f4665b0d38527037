"""The services that a kube-proxy in nftables mode serves: its maps name the frontends, its chains the endpoints."""

from collections.abc import Iterator, Mapping

import msgspec

from pykubeproxy.inspect.dump.model import EndpointView, FrontendRules
from pykubeproxy.inspect.limit import RuleLimit
from pykubeproxy.inspect.routes import FrontendRule, Policy, PolicyRoute
from pykubeproxy.inspect.targets import ServiceFilter, parse_title
from pykubeproxy.objects import Family
from pykubeproxy.rules.names import NFT_TABLES, nft_title
from pykubeproxy.rules.nft_list import Json, NftRuleset, SetKey, anonymous_elements, element_key
from pykubeproxy.rules.nft_text import expression_text, rule_text
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.ports import ANY_LOCAL, Frontend, FrontendKind, PortName

_SERVING, _REJECTING = ("service-ips", "service-nodeports"), ("no-endpoint-services", "no-endpoint-nodeports")


def nft_frontends(ruleset: NftRuleset) -> Iterator[FrontendRule]:
    """Yield the frontends with the chains that serve them, or with REJECT or DROP.

    External IPs look like load balancer IPs without source ranges.
    """
    table = _table(ruleset.family)
    limited = {expression_text(element_key(one)): verdict for one, verdict in _map(ruleset, "firewall-ips")}
    cluster_ips = {expression_text(one) for one in _elements(ruleset, "cluster-ips")}
    node_addresses = (
        _elements(ruleset, "nodeport-ips") if SetKey(table, "nodeport-ips") in ruleset.sets else ()
    )
    for name in (*_SERVING, *_REJECTING):
        for element, verdict in _map(ruleset, name):
            key, title = element_key(element), _comment(element)
            match key:
                case {"concat": [*address, str(protocol), int(port)]}:
                    target = _target(limited.get(expression_text(key), verdict))
                    rejected = name in _REJECTING
                    to = _rejection(verdict) if rejected else target
                    for at in address or node_addresses or (ANY_LOCAL,):
                        kind = FrontendKind.NODE_PORT if not address else FrontendKind.EXTERNAL_IP
                        if address and expression_text(at) in cluster_ips:
                            kind = FrontendKind.CLUSTER_IP
                        elif target.startswith("firewall-"):
                            kind = FrontendKind.LOAD_BALANCER_IP
                        frontend = Frontend(kind, expression_text(at), port)
                        yield FrontendRule(title or nft_title(target), protocol.upper(), frontend, to, ())


def find_nft_ports(ruleset: NftRuleset, filter_: ServiceFilter) -> Mapping[PortName, FrontendRules]:
    """Return the matching service ports of one family, sorted."""
    ports: dict[PortName, FrontendRules] = {}
    for rule in nft_frontends(ruleset):
        rules = ports.setdefault(parse_title(rule.title, rule.protocol), FrontendRules([], []))
        (rules.rejecting if rule.target in ("REJECT", "DROP") else rules.serving).append(rule)
    return {name: ports[name] for name in sorted(ports) if filter_.matches(name, ports[name].numbers())}


def nft_listing(ruleset: NftRuleset, filter_: ServiceFilter) -> str:
    """Return the rules of the matching services, as nft prints them after the name of their chain."""
    titles = {str(name) for name in find_nft_ports(ruleset, filter_)}
    lines = [
        f"{key.table} {key.chain}: {rule_text(rule)}\n"
        for key, chain in ruleset.chains.items()
        if key.table in NFT_TABLES and nft_title(key.chain) in titles
        for rule in chain.rules
    ]
    return "".join(lines)


class NftServiceChains(msgspec.Struct, frozen=True):
    """The chains of service ports. Their rules have no counters."""

    ruleset: NftRuleset
    limit: RuleLimit

    @property
    def family(self) -> Family:
        return self.ruleset.family

    def route(self, chain: str) -> PolicyRoute:
        """Return the route from the target of a frontend's rule."""
        if chain.startswith("firewall-"):
            onward = self.route(f"external-{chain.removeprefix('firewall-')}")
            return msgspec.structs.replace(onward, source_ranges=tuple(self._ranges(chain)))
        if not chain.startswith("external-"):
            return PolicyRoute(Policy.LOCAL if chain.startswith("local-") else Policy.CLUSTER, chain)
        to = shortcut = ""
        for statements in self._rules(chain):
            if target := _target(statements[-1]):
                to, shortcut = (target, shortcut) if len(statements) == 1 else (to, target)
        local = bool(shortcut) or to.startswith("local-")
        return PolicyRoute(Policy.LOCAL if local else Policy.CLUSTER, to, shortcut)

    def endpoints(self, chain: str, weight: float = 1.0) -> Iterator[EndpointView]:
        """Yield the endpoints over which a chain balances."""
        for statements in self._rules(chain):
            self.limit.count(1)
            match statements[-1]:
                case {
                    "dnat": {
                        "addr": {"map": {"key": {"numgen": {"mod": int(mod)}}, "data": {"set": list(chosen)}}}
                    }
                } if mod > 0:
                    for one in chosen:
                        match one:
                            case [_, {"concat": [str(address), int(port)]}]:
                                yield EndpointView(address, port, round(weight / mod, 9), 0, 0, chain)
                case {"dnat": {"addr": str(address), "port": int(port)}}:
                    yield EndpointView(address, port, round(weight, 9), 0, 0, chain)
                case {"vmap": {"key": {"numgen": {"mod": int(mod)}}, "data": {"set": list(chosen)}}} if (
                    mod > 0
                ):
                    for one in chosen:
                        match one:
                            case [_, verdict]:
                                yield from self.endpoints(_target(verdict), weight / mod)

    def affinity_seconds(self, chain: str) -> int | None:
        """Return the timeout of session affinity; None without affinity."""
        for statements in self._rules(chain):
            match statements:
                case [{"match": {"right": str(name)}}, {"goto": _}] if name.startswith("@affinity-"):
                    known = self.ruleset.sets.get(SetKey(_table(self.family), name[1:]))
                    return known.timeout if known else None
        return None

    def _rules(self, chain: str) -> Iterator[list[Mapping[str, Json]]]:
        found = self.ruleset.chains.get(ChainKey(_table(self.family), chain))
        return (list(rule.statements) for rule in (found.rules if found else ()) if rule.statements)

    def _ranges(self, chain: str) -> Iterator[str]:
        for statements in self._rules(chain):
            match statements:
                case [{"match": {"op": "!=", "right": ranges}}, {"drop": _}]:
                    for one in anonymous_elements(ranges):
                        text = expression_text(one)
                        yield text if "/" in text else f"{text}/{128 if ':' in text else 32}"


def _table(family: Family) -> str:
    return "ip6 kube-proxy" if family is Family.IPV6 else "ip kube-proxy"


def _elements(ruleset: NftRuleset, name: str) -> list[Json]:
    found = ruleset.sets.get(SetKey(_table(ruleset.family), name))
    return list(found.elements) if found else []


def _map(ruleset: NftRuleset, name: str) -> Iterator[tuple[Json, Json]]:
    for element in _elements(ruleset, name):
        match element:
            case [key, verdict]:
                yield key, verdict


def _comment(element: Json) -> str:
    match element:
        case {"elem": {"comment": str(title)}}:
            return title
    return ""


def _target(verdict: Json) -> str:
    match verdict:
        case {"goto": {"target": str(target)}}:
            return target
    return ""


def _rejection(verdict: Json) -> str:
    return "REJECT" if _target(verdict) else "DROP"
