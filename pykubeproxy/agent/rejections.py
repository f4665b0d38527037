"""Which service ports a failed write of rules concerns, and whether iptables accepts any rules at all."""

import sys
from collections.abc import Collection, Iterable, Iterator

from pykubeproxy.agent.write import SyncFailed, write_chunks
from pykubeproxy.kernel import KernelError, Rejected, Tables, TimedOut
from pykubeproxy.objects import Endpoint, Protocol, address_and_port
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.digests import digest
from pykubeproxy.rules.known import (
    Arranged,
    ChainsWritten,
    Fact,
    KnownChain,
    KnownPort,
    KnownTables,
    PortPart,
    PortsGone,
    PortsWritten,
    nat,
)
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.plan import Chunk, OwnChains, Plan, batches
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.rules.service import PortRules, port_rules
from pykubeproxy.rules.text import Chain, block, write_chains
from pykubeproxy.services.endpoints import ResolvedEndpoint
from pykubeproxy.services.ports import PortName, ServicePort
from pykubeproxy.services.selection import NodeTopology, select

# How long iptables may make no progress with a few service ports, in seconds.
TRY_SECONDS = 10.0

# Documentation addresses (RFC 5737, RFC 3849): a cluster IP and two endpoints.
_ADDRESSES = {
    False: ("192.0.2.1", "198.51.100.1", "198.51.100.2"),
    True: ("2001:db8::1", "2001:db8::2", "2001:db8::3"),
}
# The name of the ordinary service, which no Service has.
_ORDINARY = PortName("", "trial", "", Protocol.TCP.value)


def may_blame_ports(error: KernelError) -> bool:
    """Return whether the rules of service ports may be the reason of a failure."""
    return isinstance(error, TimedOut) or (isinstance(error, Rejected) and not error.is_shortage)


def reason(error: KernelError) -> str:
    """Return why a service port is quarantined after such failures."""
    if isinstance(error, Rejected):
        return f"iptables rejects its rules: {error.message}"
    return f"iptables makes no progress with its rules for {TRY_SECONDS:g} s"


def owner_of_line(line: str, facts: Iterable[Fact], plan: Plan) -> PortName | None:
    """Return the service port that a line of a block is about: by its chain, else by its rule in a shared chain."""
    _, _, text = line.partition(" ")
    chain, _, rule = text.partition(" ")
    if line.startswith(":"):
        chain = line[1:].partition(" ")[0]
    for fact in facts if chain else ():
        if isinstance(fact, PortPart) and chain in fact.chains:
            return fact.port
        for port in fact.ports if isinstance(fact, PortsWritten) else ():
            if chain in port.names.split():
                return port.name
    found = (name for name, entries in plan.entries() if rule and any(rule in rules for _, rules in entries))
    return next(found, None)


def changed_ports(facts: Collection[Fact], plan: Plan, live: Ruleset) -> list[PortName]:
    """Return the service ports of which a block would bring rules that the tables lack, in the order of the block."""
    found: dict[PortName, None] = {}
    for fact in facts:
        if isinstance(fact, PortsWritten):
            found |= dict.fromkeys(port.name for port in fact.ports if _lacks_chain(live, port))
        elif isinstance(fact, PortPart):
            chains = fact.chains.items()
            if any(_digest(live, chain) != now.digest for chain, now in chains):
                found[fact.port] = None
    roots = {fact.root for fact in facts if isinstance(fact, Arranged)}
    texts = {root: {rule for _, rules in live.of_table(root.table) for rule in rules} for root in roots}
    for name, entries in plan.entries():
        if any(rule not in texts[root] for root, rules in entries if root in roots for rule in rules):
            found[name] = None
    return list(found)


def _lacks_chain(live: Ruleset, port: KnownPort) -> bool:
    return any(
        _digest(live, chain) != now for chain, now in zip(port.names.split(), port.digests, strict=True)
    )


def _digest(live: Ruleset, chain: str) -> int | None:
    rules = live.chains.get(nat(chain))
    return None if rules is None else digest(nat(chain), rules)


def accepts_ordinary_service(tables: Tables, known: KnownTables, options: RuleOptions) -> bool:
    """Return whether iptables accepts the own chains of an ordinary service; if not, the node is at fault.

    The next sync deletes them. Raises KernelError.
    """
    try:
        write_chunks(tables, _ordinary_chunks(options), known, seconds=TRY_SECONDS)
    except SyncFailed as failed:
        if may_blame_ports(failed.error):
            return False
        raise failed.error from failed
    finally:
        known.commit([PortsGone((_ORDINARY,))])
    return True


def _ordinary_chunks(options: RuleOptions) -> Iterator[Chunk]:
    fixed = [Chain(key, rules) for key, rules in skeleton.fixed_chains(options).items() if key.table == "nat"]
    facts = ChainsWritten({chain.key: KnownChain.of(chain) for chain in fixed})
    own = tuple(Chain(nat(chain), rules) for chain, rules in _ordinary_service(options).chains())
    for batch in batches([OwnChains(own, part_of=_ORDINARY)], lambda _: sys.maxsize):
        text = write_chains([*fixed, *batch.chains])
        yield Chunk(block("nat", text), (*fixed, *batch.chains), (facts, *batch.facts))


def _ordinary_service(options: RuleOptions) -> PortRules:
    address, *endpoints = _ADDRESSES[options.ipv6]
    port = ServicePort(
        name=_ORDINARY,
        protocol=Protocol.TCP,
        cluster_ip=address,
        port=80,
        node_port=0,
        external_ips=(),
        load_balancer_ips=(),
        source_ranges=None,
        internal_local=False,
        external_local=False,
        affinity_seconds=None,
        health_check_node_port=0,
    )
    resolved = tuple(
        ResolvedEndpoint(address_and_port(address, 8080), Endpoint(address), 8080, local=False)
        for address in endpoints
    )
    return port_rules(port, select(port, resolved, NodeTopology("")), options)
