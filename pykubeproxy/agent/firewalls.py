"""Notice rules of nftables that stop packets to Services, in a separate thread.

A process of its own reads the rules and sends packets through them: it takes memory and CPU time that the agent should not
need, and most nodes have no such tables.
"""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import structlog

from pykubeproxy.agent.observe.events import NORMAL, Recorder
from pykubeproxy.kernel import Backend, KernelError, nftables
from pykubeproxy.kernel.runner import Runner
from pykubeproxy.rules.names import NFT_TABLES

# How often to look for changes, in seconds.
_PERIOD = 20.0
# The least time between two checks in seconds: if a table changed, and if only Services or elements of sets did.
_PAUSE, _LONG_PAUSE = 60.0, 600.0
_SECONDS = 60.0
_LOWEST_PRIORITY = 19
# The kernel kills this process first when memory is short.
_FIRST_TO_KILL = "1000"

log = structlog.get_logger()


def check_firewalls(backend: Backend) -> Mapping[str, str]:
    """Return what is said about each rule of nftables that stops packets to Services. Raises KernelError, ValueError."""
    runner = Runner(started=_yield_to_others)
    # -P: import nothing from the working directory.
    command = (sys.executable, "-P", "-m", "pykubeproxy.nodes.live_firewalls", backend.value)
    with runner.start(command, _SECONDS, die_with_parent=True) as running:
        ended = running.finish()
    if ended.exit_code:
        raise ValueError((ended.stderr.strip().splitlines() or [f"exit status {ended.exit_code}"])[-1])
    return msgspec.json.decode(ended.stdout, type=dict[str, str])


def _yield_to_others(process: int) -> None:
    with contextlib.suppress(OSError):  # it has ended
        os.setpriority(os.PRIO_PROCESS, process, _LOWEST_PRIORITY)
        Path(f"/proc/{process}/oom_score_adj").write_text(_FIRST_TO_KILL)


class _TablesSeen(msgspec.Struct, frozen=True):
    """What may change an answer: foreign tables, and by `generation` and `synced` all others and the rules of Services."""

    tables: bytes
    generation: int
    synced: float


_NOTHING = _TablesSeen(b"", 0, 0.0)


class FirewallWatch:
    """Report rules of nftables that stop packets to Services, and that they no longer do; `run` needs its own thread.

    `check` returns what is said about each rule, see `check_firewalls`. `last_sync` returns when the last sync ended, 0.0
    before the first. `observed` gets the number of such rules.
    """

    name = "firewalls"

    def __init__(
        self,
        check: Callable[[], Mapping[str, str]],
        last_sync: Callable[[], float],
        recorder: Recorder,
        observed: Callable[[int], None],
    ) -> None:
        self._check = check
        self._last_sync = last_sync
        self._recorder = recorder
        self._observed = observed
        self._seen = _NOTHING
        self._ended = self._not_before = -math.inf
        self._stopping: Mapping[str, str] = {}
        self._failure = ""

    def run(self) -> None:
        """Look for changes, and check after them; never return."""
        while True:
            time.sleep(_PERIOD)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Check the tables if they changed and the pauses allow it; `now` is in seconds of the monotonic clock."""
        if not (synced := self._last_sync()) or now < self._not_before:
            return
        try:
            seen = self._read(synced)
        except OSError:  # this kernel has no nftables, or a table went away meanwhile
            return
        if not seen.tables:
            self._seen = seen
            self._report({})
        elif seen.tables != self._seen.tables or (seen != self._seen and now >= self._ended + _LONG_PAUSE):
            self._seen = seen
            self._check_now()

    def _read(self, synced: float) -> _TablesSeen:
        number = nftables.generation()
        if number == self._seen.generation:
            return _TablesSeen(self._seen.tables, number, synced)
        tables = [table for table in nftables.native_tables() if table not in NFT_TABLES]
        return _TablesSeen(nftables.layout(tables) if tables else b"", number, synced)

    def _check_now(self) -> None:
        try:
            stopping, failure = self._check(), ""
        except (KernelError, ValueError) as error:
            stopping, failure = self._stopping, str(error)
        self._ended = time.monotonic()
        self._not_before = self._ended + (_LONG_PAUSE if failure else _PAUSE)
        if failure:
            self._seen = _NOTHING
            if failure != self._failure:
                log.warning("firewalls not checked", reason=failure)
        self._failure = failure
        self._report(stopping)

    def _report(self, stopping: Mapping[str, str]) -> None:
        before, self._stopping = self._stopping, stopping
        self._observed(len(stopping))
        for rule in stopping.keys() - before.keys():
            log.warning("firewall stops packets to services", finding=stopping[rule])
            self._recorder.on_node("FirewallStopsServices", stopping[rule], "CheckFirewalls")
        for rule in before.keys() - stopping.keys():
            log.info("firewall no longer stops packets to services", rule=rule)
        if before and not stopping:
            note = f"nftables lets packets to Services pass on node {self._recorder.node_name} again"
            self._recorder.on_node("FirewallPassesServices", note, "CheckFirewalls", NORMAL)
