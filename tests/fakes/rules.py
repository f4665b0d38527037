"""Rules of a service port made by a test."""

from collections.abc import Iterator
from typing import NamedTuple

from pykubeproxy.rules.ruleset import Entries, Rules


class GivenRules(NamedTuple):
    """Stands in for PortRules with given chains instead of rendered ones."""

    given: tuple[tuple[str, Rules], ...]
    entries: Entries

    def chains(self) -> Iterator[tuple[str, Rules]]:
        return iter(self.given)
