"""Count the TCP connections that stay on endpoints which no longer serve, in a separate thread."""

import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache, partial

import structlog

from pykubeproxy.kernel import conntrack
from pykubeproxy.objects import Family
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.flows import TranslatedFlow, count_stale_connections

# Seconds between two counts, and the most of a CPU that counting takes.
PERIOD, _SHARE = 60.0, 0.01

log = structlog.get_logger()


class StaleConnections:
    """Count the established TCP connections to Services whose endpoint no longer serves, once a minute.

    - `ask`: answers a question about the cluster, or returns None while a sync runs
    - `counted`: called with each family and its number
    """

    name = "tcp-flows"

    def __init__(
        self,
        families: Iterable[Family],
        ask: Callable[[Callable[[Cluster], int]], int | None],
        counted: Callable[[Family, int], None],
    ) -> None:
        self._families = tuple(families)
        self._ask = ask
        self._counted = counted
        self._warned: set[Family] = set()

    def run(self) -> None:
        """Count again and again; never return. A large table is read less often."""
        while True:
            started = time.thread_time()
            self.count()
            time.sleep(max(PERIOD, (time.thread_time() - started) / _SHARE))

    def count(self) -> None:
        """Count once. A family whose connections cannot be read keeps its last number."""
        for family in self._families:
            try:
                flows = _translated(family)
            except OSError as error:
                if family not in self._warned:
                    self._warned.add(family)
                    log.warning("stale connections not counted", family=family.value, error=str(error))
                continue
            number = self._ask(partial(count_stale_connections, flows, family)) if flows else 0
            if number is not None:
                self._counted(family, number)


def _translated(family: Family) -> Counter[TranslatedFlow]:
    """Return how many connections have each destination and endpoint. Raises OSError."""
    packed = Counter(
        (flow.destination, flow.reply_source) for flow in conntrack.translated_connections(family)
    )
    found: Counter[TranslatedFlow] = Counter()
    for (destination, endpoint), number in packed.items():
        found[TranslatedFlow(_text(destination), _text(endpoint))] = number
    return found


@lru_cache(1 << 14)
def _text(end: conntrack.AddressAndPort) -> tuple[str, int]:
    return str(ipaddress.ip_address(end[0])), end[1]
