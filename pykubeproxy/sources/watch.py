"""The interface of every source of objects."""

from collections.abc import Callable
from typing import NoReturn, Protocol

import msgspec

from pykubeproxy.objects import Event, Listed

Emit = Callable[[Event], None]


class SourceError(Exception):
    """A source that cannot be used; str() is one line that says why and what to do."""


class Outage(msgspec.Struct, frozen=True):
    """A resource, such as "services", that has not been watched for `seconds`."""

    resource: str
    seconds: float
    reason: str


class Watch(Protocol):
    """A source of objects: first the complete state, then every change."""

    @property
    def name(self) -> str:
        """The name of its thread."""

    @property
    def outage(self) -> Outage | None:
        """The current outage; any thread may read it."""

    @property
    def list_outage(self) -> Outage | None:
        """How long and why lists have failed although the server answers; any thread may read it."""

    def once(self) -> tuple[Listed, ...]:
        """Read the current state in one attempt. Raises SourceError."""

    def run(self, emit: Emit) -> NoReturn:
        """Emit a Listed for each kind, then every change; never return.

        Log faults of a server or network, and retry. Raises SourceError if the first read fails and a retry would not
        help. An exception of `emit` passes through.
        """
