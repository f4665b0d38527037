"""What every source of objects is to those who use it."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from pykubeproxy.objects import Event, Listed

Emit = Callable[[Event], None]


class SourceError(Exception):
    """A source that cannot be used at all; str() is one line that says why and what to do."""


class Trouble(msgspec.Struct, frozen=True):
    """That objects called `what` have not been watched for `seconds`, and `why` in a line."""

    what: str
    seconds: float
    why: str


class Watch(Protocol):
    """Something that tells which objects there are, first whole and then change by change."""

    @property
    def name(self) -> str:
        """A short name for a thread and for the log."""

    @property
    def trouble(self) -> Trouble | None:
        """What stands in its way at this moment; for any thread."""

    def once(self) -> tuple[Listed, ...]:
        """Read the present state in one try. Raises SourceError if it cannot be read."""

    def run(self, emit: Emit) -> None:
        """Emit the present state and then every change, until `stop`; a Listed comes first for each kind.

        Blocks; meant for a thread of its own. Troubles with a server or a network are logged and waited out.
        Raises SourceError when nothing could be read to begin with and trying again would not help; what `emit` raises
        passes through.
        """

    def stop(self) -> None:
        """Make `run` return within a second, whatever it is waiting for; for any thread. There is no way back."""
