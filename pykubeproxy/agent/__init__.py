"""The agent: apply events to the state of the cluster, and sync the tables of this node at a limited rate.

`serve` (`process.py`) runs it. Its options and errors are here, because callers need them before most of the agent is
imported.
"""

from collections.abc import Callable, Mapping

import msgspec

from pykubeproxy.config import Loaded


class RunOptions(msgspec.Struct, frozen=True):
    """The options of `pykubeproxy run`.

    `loaded` is the configuration; the caller logs its warnings. `flags` are the given flags, for /flagz. `manifests` is
    a path with objects; None means an API server. A change of `config_file`, if not empty, ends the process.
    `dropped_lines` returns how many log lines were dropped; `drain_log` waits up to some seconds until all are written.
    """

    loaded: Loaded
    flags: Mapping[str, object]
    config_file: str = ""
    manifests: str | None = None
    once: bool = False
    dropped_lines: Callable[[], int] = lambda: 0
    drain_log: Callable[[float], None] = lambda _: None


class BindFailed(Exception):
    """The address of `server` cannot be bound, and bindAddressHardFail is set; str() is a message for the operator."""

    def __init__(self, server: str, message: str) -> None:
        super().__init__(message)
        self.server = server
