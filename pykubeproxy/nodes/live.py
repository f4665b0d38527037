"""The node that this program runs on: the live tables of one backend."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from pykubeproxy import kernel
from pykubeproxy.inspect.dump.render_rules import OTHER_CHAINS
from pykubeproxy.inspect.flows import Flow, FlowTable, parse_flow_table, parse_flows
from pykubeproxy.inspect.node import (
    NodeRules,
    NodeState,
    Origin,
    Question,
    ReadError,
    nftables_remarks,
    unread_rules,
)
from pykubeproxy.inspect.packets.packet import NodeNetwork, NodeRoute
from pykubeproxy.inspect.targets import ServiceFilter
from pykubeproxy.kernel import TABLES, Backend, Iptables, KernelError, conntrack, nftables, recent, system
from pykubeproxy.kernel.network import routes
from pykubeproxy.nodes import host_name
from pykubeproxy.objects import Family, Node, Protocol
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts
from pykubeproxy.rules.nft_list import NftRuleset, read_nft_lists
from pykubeproxy.rules.save_files import InvalidSave
from pykubeproxy.rules.skeleton import NAT_SERVICES
from pykubeproxy.services.ports import ANY_LOCAL, Frontend
from pykubeproxy.wording import listed

_ELSEWHERE = "or read rules from a file with --rules or --bundle"


class LiveNode:
    """This node. `backend` is chosen by the rules that serve it if it is "auto".

    If both backends have service-proxy rules, the one is read that the agent on this node writes; a remark says so.
    """

    def __init__(self, backend: Literal["auto", "nft", "legacy"]) -> None:
        self._setting = backend
        self._chosen: tuple[Backend, tuple[str, ...]] | None = None

    def nodes(self, question: Question) -> Iterator[NodeState]:
        """Yield this node. Of both families, skip one that the kernel lacks. Raises ReadError, NotPermitted."""
        try:
            yield self._read(question)
        except kernel.NotPermitted:
            raise
        except (kernel.NotANode, kernel.Missing) as error:
            raise ReadError(f"{error}, {_ELSEWHERE}") from None
        except KernelError as error:
            raise ReadError(str(error)) from None

    def _read(self, question: Question) -> NodeState:
        self._chosen = self._chosen or self._backend()
        backend, remarks = self._chosen
        rules: dict[Family, NodeRules] = {}
        unread: dict[str, str] = {}
        alone = len(question.families) == 1
        for family in question.families:
            if reason := kernel.unsupported_reason(backend, family) if question.facts else None:
                if alone:
                    raise ReadError(reason)
                unread[unread_rules(family)] = reason
                continue
            try:
                rules[family] = _rules(kernel.open_iptables(backend, family), question)
            except KernelError as error:
                if alone or isinstance(error, kernel.NotPermitted):
                    raise
                lacking = isinstance(error, kernel.Missing | kernel.UnsupportedFamily)
                if not lacking and kernel.has_nat(backend, family):
                    raise
                unread[unread_rules(family)] = str(error)
        if question.nftables:
            native, left_out = _nftables()
            remarks = (*remarks, *left_out)
            rules = {
                family: msgspec.structs.replace(one, nftables=native.get(family))
                for family, one in rules.items()
            }
        return NodeState(
            node=Node(host_name()),
            origin=Origin(f"live rules ({backend.value})", f"in the {backend.value} tables of this node"),
            rules=rules,
            network=_network(question.families) if question.lazily or question.addresses else NodeNetwork(),
            unread=unread,
            remarks=remarks,
            flows=live_flows(question.families) if question.flows else None,
        )

    def _backend(self) -> tuple[Backend, tuple[str, ...]]:
        """Return the backend to read, with a remark if both have service-proxy rules. Raises KernelError."""
        kernel.require_linux()
        chosen = kernel.choose_backend(self._setting, holding=NAT_SERVICES)
        other = kernel.other_backend_with_chain(chosen, NAT_SERVICES)
        if other is None:
            return chosen, ()
        from pykubeproxy.nodes import agent  # most nodes have one backend, and need no HTTP

        written = agent.agent_backend() if self._setting == "auto" else ""
        if written == other.value:
            chosen, other = other, chosen
        writer = ", which the agent writes" if written == chosen.value else ""
        remark = (
            f"this shows the {chosen.value} tables{writer}. The {other.value} tables have service-proxy rules too, and"
            " packets pass both. Run `pykubeproxy check` for advice."
        )
        return chosen, (remark,)


def live_flows(families: Iterable[Family] = Family) -> FlowTable:
    """Return what this kernel remembers of connections of these families."""
    lines, unread, unread_lists = live_flow_lines(families)
    return parse_flow_table("\n".join(lines), unread, unread_lists)


def live_flows_to(family: Family, protocol: Protocol, frontends: Iterable[Frontend]) -> list[Flow]:
    """Return the flows of this node to some frontends; none if they cannot be read."""
    lines: list[str] = []
    try:
        for frontend in frontends:
            address = "" if frontend.address == ANY_LOCAL else frontend.address
            name = protocol.value.lower()
            lines += conntrack.flow_lines(family, name, destination=address, port=frontend.port)
    except OSError:
        return []
    return parse_flows("\n".join(lines))


def live_flow_lines(families: Iterable[Family] = Family) -> tuple[list[str], str, str]:
    """Return the lines that `parse_flow_table` reads, why flows are missing, and why affinity lists are; else ""."""
    lines: list[str] = []
    unread = unread_lists = ""
    try:
        for family in families:
            lines += conntrack.flow_lines(family)
    except PermissionError:
        unread = "only root with CAP_NET_ADMIN can read conntrack"
    except OSError as error:
        unread = (
            f"cannot read conntrack ({error.strerror or error}); load the kernel module nf_conntrack_netlink"
        )
    try:
        lines += recent.recent_lines()
    except OSError as error:
        unread_lists = f"cannot read {error.filename}: {error.strerror}"
    return lines, unread, unread_lists


def _rules(iptables: Iptables, question: Question) -> NodeRules:
    backend = iptables.backend.value
    if question.facts:
        return NodeRules(iptables.save(TABLES), backend=backend, facts=_facts(iptables, question.addresses))
    if question.lazily:
        return NodeRules(*kernel.live_ruleset(iptables), backend)
    part = None
    if question.service.name:
        part = kernel.live_ruleset_about(iptables, _word(question.service), skeleton.SHARED, OTHER_CHAINS)
    return NodeRules(*(part or iptables.save_counted()), backend)


def _nftables() -> tuple[Mapping[Family, NftRuleset], tuple[str, ...]]:
    """Return the tables of nftables by family, and remarks about what is left out of them."""
    try:
        tables = nftables.native_tables()
    except OSError:  # this kernel has no nftables; without permission, reading iptables has failed before
        return {}, ()
    try:
        native = read_nft_lists(nftables.print_tables(tables), "nft") if tables else {}
    except (KernelError, InvalidSave) as error:
        return {}, (f"rules in {listed(tables)} of nftables are not evaluated: {error}",)
    return native, tuple(nftables_remarks(native.values()))


def _word(service: ServiceFilter) -> str:
    """Return what the comments of all rules about a Service contain."""
    return f"{service.namespace}/{service.name}"


def _facts(iptables: Iptables, with_addresses: bool) -> KernelFacts:
    """Return the facts with which an agent would write rules here: it would create the nfacct counters."""
    addresses = kernel.local_addresses(iptables.family) if with_addresses else ()
    features = kernel.probe_features(iptables).require()
    return KernelFacts(
        addresses=tuple(local.address for local in addresses),
        random_fully=features.random_fully,
        nfacct=features.nfacct,
        tcp_be_liberal=system.read_setting("net/netfilter/nf_conntrack_tcp_be_liberal") == "1",
    )


def _network(families: tuple[Family, ...]) -> NodeNetwork:
    addresses = frozenset(
        address.address for family in families for address in kernel.local_addresses(family)
    )
    return NodeNetwork(
        addresses,
        tuple(NodeRoute(route.network, route.interface) for family in families for route in routes(family)),
    )
