"""The rules that commands inspect: the live tables of this node, files, or a bundle."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Protocol

import click

from pykubeproxy import kernel
from pykubeproxy.cli.inputs import backend_to_read
from pykubeproxy.inspect.dump.render_rules import OTHER_CHAINS
from pykubeproxy.inspect.filter import ServiceFilter
from pykubeproxy.inspect.limit import TooManyRules
from pykubeproxy.inspect.trace.packet import Host, Route
from pykubeproxy.kernel import TABLES, Backend, Iptables, KernelError
from pykubeproxy.kernel.addresses import routes
from pykubeproxy.objects import Family
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.ruleset import Counters, Ruleset

# Most commands read live rules, so only the functions that need others import the modules for them.
if TYPE_CHECKING:
    from pykubeproxy.bundle.read import Bundle
    from pykubeproxy.rules.context import KernelFacts


class NodeRules(Protocol):
    """The rules of one node, and what is known about it with them. Methods raise KernelError and ClickException."""

    @property
    def title(self) -> str:
        """Name the rules, as one side of a comparison."""

    @property
    def place(self) -> str:
        """Name the place in a sentence: "in the nft tables of this node"."""

    def counted(self, families: Sequence[Family], query: ServiceFilter) -> Sequence[tuple[Ruleset, Counters]]:
        """Return the rules and counters of these families, at least those that the query needs."""

    def for_packets(self, family: Family) -> tuple[Ruleset, Host]:
        """Return the rules of a family, and the addresses and routes of the node."""

    def with_facts(
        self, families: Sequence[Family], with_addresses: bool
    ) -> "Iterator[tuple[Ruleset, KernelFacts]]":
        """Yield the rules of these families and the facts about the kernel; addresses only on request, if known."""


@contextmanager
def rules_errors() -> Iterator[None]:
    """Raise errors about rules as ClickException, with the advice to use files. Works as a decorator too."""
    try:
        yield
    except (kernel.NotANode, kernel.NotPermitted, kernel.Missing) as error:
        raise click.ClickException(f"{error}, or read rules from a file with --rules or --bundle") from None
    except (KernelError, TooManyRules) as error:
        raise click.ClickException(str(error)) from None


def node_rules(
    files: Sequence[str],
    bundle: "Bundle | None",
    backend: Literal["auto", "nft", "legacy"],
    addresses: tuple[str, ...] = (),
) -> NodeRules:
    """Return the rules in files or in a bundle, or without both the live rules. Raises KernelError, ClickException."""
    if files and bundle:
        raise click.UsageError("--bundle cannot be combined with --rules; remove one of them")
    if bundle:
        from pykubeproxy.cli.bundle_files import bundled_rules

        return bundled_rules(bundle, backend, addresses)
    if files:
        from pykubeproxy.cli.rules_files import read_rules

        return read_rules(files, backend, addresses)
    if addresses:
        raise click.UsageError(
            "--node-address has no effect on live rules; remove it, or add --rules or --bundle"
        )
    return LiveRules(backend_to_read(backend))


class LiveRules:
    """The live tables of one backend of this node. See NodeRules."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.title = f"live rules ({backend.value})"
        self.place = f"in the {backend.value} tables of this node"

    def counted(self, families: Sequence[Family], query: ServiceFilter) -> Sequence[tuple[Ruleset, Counters]]:
        """Read the live tables as far as the query needs them. Of both families, skip one that this node lacks."""
        live = []
        for family in families:
            try:
                live.append(_tables(kernel.open_iptables(self._backend, family), query))
            except KernelError as error:
                if len(families) == 1 or isinstance(error, kernel.NotPermitted):
                    raise
                if not isinstance(error, kernel.Missing) and kernel.has_nat(self._backend, family):
                    raise
        return live

    def for_packets(self, family: Family) -> tuple[Ruleset, Host]:
        """Return the live rules; on nft, each chain is read when a packet reaches it."""
        ruleset, _ = kernel.live_ruleset(kernel.open_iptables(self._backend, family))
        local = kernel.local_addresses(family)
        known_routes = tuple(Route(*route) for route in routes(family))
        return ruleset, Host(frozenset(it.address for it in local), known_routes)

    def with_facts(
        self, families: Sequence[Family], with_addresses: bool
    ) -> "Iterator[tuple[Ruleset, KernelFacts]]":
        """Read the tables with service-proxy rules. Of both families, skip one that this kernel lacks."""
        # Importing the agent takes half a second.
        from pykubeproxy.agent.startup import kernel_facts

        for family in families:
            reason = kernel.unsupported_reason(self._backend, family)
            if reason and len(families) == 1:
                raise click.ClickException(reason)
            if not reason:
                iptables = kernel.open_iptables(self._backend, family)
                features = kernel.probe_features(iptables)
                # The agent would create nfacct counters; assume that it can.
                yield iptables.save(TABLES), kernel_facts(family, features, with_addresses)


def _tables(iptables: Iptables, query: ServiceFilter) -> tuple[Ruleset, Counters]:
    """Read one family; for a query by name, only the chains about that service if comments name it."""
    part = None
    if query.name:
        word = f"{query.namespace}/{query.name}"
        part = kernel.live_ruleset_about(iptables, word, skeleton.SHARED, OTHER_CHAINS)
    return part or iptables.save_counted()
