"""Tell service ports that an agent leaves unserved on purpose from those that its rules lack."""

from collections.abc import Collection, Mapping
from typing import NamedTuple, Self

from pykubeproxy.inspect.fleet.services import PortTitle
from pykubeproxy.inspect.meaning.outcomes import MeaningChange
from pykubeproxy.inspect.routes import rejecting_rules
from pykubeproxy.objects import Family, Protocol, family_of
from pykubeproxy.rules.ruleset import Ruleset


class Unserved(NamedTuple):
    """What the agent of a node does not serve by design.

    - `quarantined`: the names of service ports, and of whole Services, that its rules mark so
    - `reserved`: external addresses that it needs itself
    """

    quarantined: Mapping[Family, frozenset[str]]
    reserved: Collection[tuple[str, int]]

    @classmethod
    def from_rules(cls, tables: Mapping[Family, Ruleset], reserved: Collection[tuple[str, int]]) -> Self:
        """Return what these rules of pykubeproxy leave unserved."""
        marked = {
            family: frozenset(it.title for it in rejecting_rules(live) if it.quarantined)
            for family, live in tables.items()
        }
        return cls(marked, reserved)

    def is_quarantined(self, title: PortTitle, change: MeaningChange) -> bool:
        """Return whether no packet is served because the port, or its Service, is quarantined."""
        marked = self.quarantined.get(family_of(change.destination.address), frozenset())
        names = {str(title.service), f"{title.service}:{title.port}"}
        return not marked.isdisjoint(names) and not _served(change)

    def is_reserved(self, change: MeaningChange) -> bool:
        """Return whether packets are left alone because they go to an API server, or to the agent itself."""
        to = change.destination
        return (
            to.protocol == Protocol.TCP.value
            and (to.address, to.port) in self.reserved
            and not _served(change)
        )


def _served(change: MeaningChange) -> bool:
    return any(it.endpoint for it in change.before)
