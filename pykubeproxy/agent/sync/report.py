"""What a sync tells of itself."""

from collections.abc import Mapping

import msgspec

from pykubeproxy.agent.quarantine.quarantine import Quarantined
from pykubeproxy.kernel import TableCounts
from pykubeproxy.objects import Family
from pykubeproxy.rules.damage import Damage
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.resolve import ResolvedPort


class Report(msgspec.Struct, frozen=True):
    """What one sync of one family did.

    `seconds` are those of its phases, `endpoints` all there are of services, `rules` how many of ours each table holds, and
    `held` what others' writing is told by.
    `installed` are the UDP frontends that were in the tables before a full sync. `aside` are all service ports that are
    set aside, of those looked at and others. `repaired` is what others had done to our chains, as far as it was noticed
    before the sync.
    """

    family: Family
    full: bool
    services: int
    endpoints: int
    chains_written: int
    chains_deleted: int
    rules_written: Mapping[str, int]
    rules: Mapping[str, int]
    seconds: Mapping[str, float]
    served: tuple[ResolvedPort, ...]
    gone: tuple[PortName, ...]
    wrote: bool
    installed: frozenset[tuple[str, int]] = frozenset()
    aside: tuple[Quarantined, ...] = ()
    repaired: tuple[Damage, ...] = ()
    held: TableCounts = TableCounts()
