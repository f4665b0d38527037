"""The tables of one family in one backend: read by iptables-save, written by iptables-restore only."""

import re
import shlex
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from pykubeproxy.kernel.errors import Failed, NotPermitted, Unreadable
from pykubeproxy.kernel.legacy import TABLES_FILE
from pykubeproxy.kernel.rejection import explain
from pykubeproxy.kernel.restore import IptablesSession, RestoreSession
from pykubeproxy.kernel.runner import Outcome, Runner
from pykubeproxy.kernel.tools import Backend, Tools, find_tools, lock_options
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import BUILT_IN, ChainKey, Counters, Ruleset, parse
from pykubeproxy.rules.saved import canonical, read_counted

# iptables-nft-save reports this in a comment, omits the table, and exits with 0.
_UNREADABLE = re.compile(r"^# (Table `\w+' is incompatible.*)$", re.MULTILINE)
_NO_CHAIN = "No chain/target/match by that name"
# Above this many chains it is faster to read whole tables.
_MOST_CHAINS = 20


class Tables(Protocol):
    """The tables of one family, real ones or a test double. See Iptables for each method."""

    @property
    def backend(self) -> Backend: ...
    @property
    def family(self) -> Family: ...
    def save(self, tables: Collection[str] | None = None) -> Ruleset: ...
    def chains(self, keys: Collection[ChainKey]) -> Ruleset: ...
    def has_chain(self, key: ChainKey) -> bool: ...
    def has_rule(self, key: ChainKey, rule: str) -> bool: ...
    def restore(self, text: str) -> None: ...
    def session(self, seconds: float | None = None) -> AbstractContextManager[RestoreSession]: ...


class Iptables(msgspec.Struct, frozen=True):
    """iptables-save and iptables-restore for one backend and family. Rules are in the form we write (see `canonical`)."""

    tools: Tools
    runner: Runner = Runner()
    seconds: float = 60
    """The longest time that a command may make no progress."""

    @property
    def backend(self) -> Backend:
        """Return the backend that holds the rules."""
        return self.tools.backend

    @property
    def family(self) -> Family:
        """Return the address family."""
        return self.tools.family

    def save(self, tables: Collection[str] | None = None) -> Ruleset:
        """Return the live tables, all or only those named.

        Leaves out missing tables, and creates none. nft may show a table with its built-in chains before it exists.
        Raises Unreadable, Failed, TimedOut, NotPermitted.
        """
        if tables is not None and len(tables) == 1:
            (table,) = tables
            return self._parse(self._save_one(table))
        live = self._parse(self._run_save(()))
        if tables is None:
            return live
        return Ruleset(self.family, {key: live.chains[key] for key in live.chains if key.table in tables})

    def save_counted(self) -> tuple[Ruleset, Counters]:
        """Return all live tables, and how often each rule has matched. Raises as `save` does."""
        saved = self._run_save(("--counters",))
        try:
            return read_counted(self.family, canonical(saved))
        except ValueError as error:
            raise self._unreadable(error) from error

    def copy_saved(self, write: Callable[[bytes], None]) -> None:
        """Call `write` with each piece of what iptables-save prints of all live tables, with counters.

        An exception from `write` ends it. Raises Failed, TimedOut, NotPermitted.
        """
        argv = (self.tools.save, "--counters")
        self._check_saved(self.runner.copy(argv, write, seconds=self.seconds))

    def chain(self, key: ChainKey) -> str:
        """Return what `iptables -v -S` prints of one chain; "" if there is none.

        Takes some milliseconds on nft; on legacy, which fetches the whole table, 0.2 s at 160,000 rules. Raises as
        `has_chain` does, and Failed for rules that iptables cannot show.
        """
        outcome = self._list(key, "-v")
        if outcome.exit_code == 0:
            return canonical(outcome.stdout)
        if _NO_CHAIN in outcome.stderr:
            return ""
        raise explain(self.tools.main, outcome.exit_code, outcome.stderr, self.runner.lock_file)

    def chains(self, keys: Collection[ChainKey]) -> Ruleset:
        """Return these chains, as far as they exist.

        Takes some milliseconds for each on nft; on legacy, or for many chains, it reads whole tables. May leave out a
        user-defined chain that iptables cannot show: iptables-nft 1.8.9 reports a missing one in the same way. Raises as
        `save` does, and Unreadable for a built-in chain.
        """
        if self.backend is Backend.LEGACY or len(keys) > _MOST_CHAINS:
            live = self.save({key.table for key in keys})
            return Ruleset(self.family, {key: live.chains[key] for key in keys if key in live.chains})
        return Ruleset(self.family, {key: rules for key in keys if (rules := self._rules(key)) is not None})

    def has_chain(self, key: ChainKey) -> bool:
        """Return whether a chain exists; one that iptables cannot show counts as missing.

        Takes some milliseconds; on legacy, which fetches the whole table, 0.1 s at 60,000 rules. Creates nothing.
        Raises LockHeld, TimedOut, NotPermitted, Failed.
        """
        if self.backend is Backend.LEGACY and key.table not in self.legacy_tables():
            return False
        outcome = self._list(key)
        if outcome.exit_code == 0:
            return True
        # iptables-nft 1.8.9 calls a missing chain incompatible.
        if _NO_CHAIN in outcome.stderr or "is incompatible" in outcome.stderr:
            return False
        raise explain(self.tools.main, outcome.exit_code, outcome.stderr, self.runner.lock_file)

    def has_rule(self, key: ChainKey, rule: str) -> bool:
        """Return whether a chain has this rule, even next to rules that iptables cannot show.

        Takes some milliseconds. Raises as `has_chain` does.
        """
        argv = (
            self.tools.main,
            *lock_options(self.tools),
            "-t",
            key.table,
            "-C",
            key.chain,
            *shlex.split(rule),
        )
        outcome = self.runner.run(argv, seconds=self.seconds)
        if outcome.exit_code in (0, 1):
            return outcome.exit_code == 0
        raise explain(self.tools.main, outcome.exit_code, outcome.stderr, self.runner.lock_file)

    def restore(self, text: str) -> None:
        """Write `text` with iptables-restore, block by block. Raises as a session does."""
        with self.session() as session:
            session.write(text)

    def session(self, seconds: float | None = None) -> IptablesSession:
        """Return a session with iptables-restore, for writing while the caller renders more text.

        `seconds` limits the time without progress, if it is less than that of other commands.
        """
        return IptablesSession(self.tools, self.runner, min(seconds or self.seconds, self.seconds))

    def legacy_tables(self) -> frozenset[str]:
        """Return the tables that exist in the legacy backend of this family; creates none."""
        names = self.runner.read(str(TABLES_FILE[self.family]))
        return frozenset((names or "").split())

    def _save_one(self, table: str) -> str:
        # iptables-legacy-save would create the table.
        if self.backend is Backend.LEGACY and table not in self.legacy_tables():
            return ""
        return self._run_save(("-t", table))

    def _parse(self, saved: str) -> Ruleset:
        try:
            return parse(self.family, canonical(saved))
        except ValueError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: ValueError) -> Failed:
        return Failed(self.tools.save, 0, f"cannot parse its output: {error}")

    def _rules(self, key: ChainKey) -> tuple[str, ...] | None:
        """Return the rules of one chain; None if it does not exist."""
        outcome = self._list(key)
        if outcome.exit_code == 0:
            lines = canonical(outcome.stdout).splitlines()
            return tuple(line.removeprefix(f"-A {key.chain} ") for line in lines if line.startswith("-A "))
        unclear = "is incompatible" in outcome.stderr
        if unclear and key.chain in BUILT_IN:
            raise Unreadable(self.tools.main, outcome.exit_code, outcome.stderr.strip())
        if unclear or _NO_CHAIN in outcome.stderr:
            return None
        raise explain(self.tools.main, outcome.exit_code, outcome.stderr, self.runner.lock_file)

    def _list(self, key: ChainKey, *options: str) -> Outcome:
        argv = (self.tools.main, *lock_options(self.tools), "-t", key.table, *options, "-S", key.chain)
        return self.runner.run(argv, seconds=self.seconds)

    def _run_save(self, arguments: tuple[str, ...]) -> str:
        outcome = self.runner.run((self.tools.save, *arguments), seconds=self.seconds)
        self._check_saved(outcome)
        # The pattern alone is slow over a large table.
        if " is incompatible" in outcome.stdout and (match := _UNREADABLE.search(outcome.stdout)):
            raise Unreadable(self.tools.save, 0, f"{match[1]} It holds rules that iptables cannot show.")
        return outcome.stdout

    def _check_saved(self, outcome: Outcome) -> None:
        if "Permission denied" in outcome.stderr:
            raise NotPermitted(self.tools.save, outcome.stderr.strip())
        if outcome.exit_code:
            raise Failed(self.tools.save, outcome.exit_code, outcome.stderr.strip())


def open_iptables(
    backend: Backend, family: Family, runner: Runner | None = None, seconds: float = 60
) -> Iptables:
    """Return the tables of a family in a backend. Raises Missing if its commands are not installed."""
    runner = runner or Runner()
    return Iptables(find_tools(backend, family, runner), runner, seconds)
