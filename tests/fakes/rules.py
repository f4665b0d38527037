"""Rules of a service port that a test makes itself."""

from collections.abc import Iterator
from typing import NamedTuple

from pykubeproxy.rules.service import Entries, Rules


class GivenRules(NamedTuple):
    """What PortRules offers, from given chains instead of rendered ones."""

    given: tuple[tuple[str, Rules], ...]
    entries: Entries

    def chains(self) -> Iterator[tuple[str, Rules]]:
        return iter(self.given)
