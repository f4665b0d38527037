"""The tables of one family in one backend: read whole, changed by iptables-restore only."""

import itertools
import re
import shlex
from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

import msgspec

from pykubeproxy.kernel.errors import Failed, NotPermitted, Unreadable
from pykubeproxy.kernel.legacy import TABLES_FILE
from pykubeproxy.kernel.refusal import explain
from pykubeproxy.kernel.runner import Outcome, Runner
from pykubeproxy.kernel.tools import Backend, Tools, find_tools
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import BUILT_IN, ChainKey, Counters, Ruleset, parse
from pykubeproxy.rules.saved import read_counted

# How long legacy waits for its lock (seconds), and how often versions that poll for it look (microseconds).
LOCK_SECONDS = 5
_POLL_MICROSECONDS = 100_000
# iptables-nft-save says so in a comment, leaves the table out, and exits with 0.
_UNREADABLE = re.compile(r"^# (Table `\w+' is incompatible.*)$", re.MULTILINE)
# What str.splitlines takes for the end of a line, and a quoted comment that holds such a thing.
_BREAKS = "\\n\\r\\v\\f\\x1c-\\x1e\\x85\\u2028\\u2029"
_BREAK = re.compile(f"[{_BREAKS}]")
_BROKEN_COMMENT = re.compile(
    rf'--comment "[^"\\{_BREAKS}]*(?:\\.[^"\\{_BREAKS}]*)*[{_BREAKS}](?:[^"\\]|\\.)*"', re.DOTALL
)
_NO_CHAIN = "No chain/target/match by that name"
# From so many single chains on it is faster to read everything.
_MOST_CHAINS = 20
# iptables-restore searches the names it has been told before for each new one, in 512 lists: with 55,000 chains of
# iptables-nft, in blocks of 200, a fresh command every so many blocks saves a fifth of the time.
_BLOCKS_PER_COMMAND = 50
_END_OF_BLOCK = "COMMIT\n"


class Tables(Protocol):
    """What a caller may rely on, be it the real thing or a stand-in for it."""

    @property
    def backend(self) -> Backend: ...
    @property
    def family(self) -> Family: ...
    def save(self, tables: Collection[str] | None = None) -> Ruleset: ...
    def chains(self, keys: Collection[ChainKey]) -> Ruleset: ...
    def has_chain(self, key: ChainKey) -> bool: ...
    def has_rule(self, key: ChainKey, rule: str) -> bool: ...
    def restore(self, text: str | Iterable[str]) -> None: ...


class Iptables(msgspec.Struct, frozen=True):
    """iptables-save and iptables-restore for one backend and family."""

    tools: Tools
    runner: Runner = Runner()
    seconds: float = 60
    """The time limit of one command."""

    @property
    def backend(self) -> Backend:
        """Where the rules live."""
        return self.tools.backend

    @property
    def family(self) -> Family:
        """IPv4 or IPv6."""
        return self.tools.family

    def save(self, tables: Collection[str] | None = None) -> Ruleset:
        """The live tables, all or only those named, with rules in the form we write them (see `canonical`).

        A table that does not exist is left out, and is not created by looking. On nft a table may be shown
        with its built-in chains before it exists. Raises Unreadable, Failed, TimedOut, NotPermitted.
        """
        if tables is not None and len(tables) == 1:
            (table,) = tables
            return self._parse(self._save_one(table))
        live = self._parse(self._run_save(()))
        if tables is None:
            return live
        return Ruleset(self.family, {key: live.chains[key] for key in live.chains if key.table in tables})

    def save_counted(self) -> tuple[Ruleset, Counters]:
        """All live tables as `save` gives them, and how often each rule has matched. Raises as `save` does."""
        saved = self._run_save(("--counters",))
        try:
            return read_counted(self.family, canonical(saved))
        except ValueError as error:
            raise self._unreadable(error) from error

    def chain(self, key: ChainKey) -> str:
        """What `iptables -v -S` prints of one chain, in the form of `save`; "" if there is none.

        Takes some milliseconds on nft; on legacy, which fetches the whole table, 0.2 s at 160,000 rules. Raises as
        `has_chain` does, and Failed for rules that iptables cannot show.
        """
        outcome = self._list(key, "-v")
        if outcome.exit_code == 0:
            return canonical(outcome.stdout)
        if _NO_CHAIN in outcome.stderr:
            return ""
        raise explain(self.tools.main, outcome.exit_code, outcome.stderr, "", self.runner.lock_file)

    def chains(self, keys: Collection[ChainKey]) -> Ruleset:
        """Those of these chains that there are, as `save` gives them, and with its exceptions.

        Takes some milliseconds for each on nft; on legacy, and for many, whole tables are read. A chain of somebody's
        own that iptables cannot show may be left out: iptables-nft 1.8.9 says the same of one that is not there.
        Raises as `save` does, and Unreadable for a built-in chain.
        """
        if self.backend is Backend.LEGACY or len(keys) > _MOST_CHAINS:
            live = self.save({key.table for key in keys})
            return Ruleset(self.family, {key: live.chains[key] for key in keys if key in live.chains})
        return Ruleset(self.family, {key: rules for key in keys if (rules := self._rules(key)) is not None})

    def has_chain(self, key: ChainKey) -> bool:
        """Whether a chain exists; one that iptables cannot show counts as missing.

        Takes some milliseconds; on legacy, which fetches the whole table, 0.1 s at 60,000 rules. Nothing is
        created by looking. Raises LockHeld, TimedOut, NotPermitted, Failed.
        """
        if self.backend is Backend.LEGACY and key.table not in self.legacy_tables():
            return False
        outcome = self._list(key)
        if outcome.exit_code == 0:
            return True
        # iptables-nft 1.8.9 says of a chain that is not there that it is incompatible.
        if _NO_CHAIN in outcome.stderr or "is incompatible" in outcome.stderr:
            return False
        raise explain(self.tools.main, outcome.exit_code, outcome.stderr, "", self.runner.lock_file)

    def has_rule(self, key: ChainKey, rule: str) -> bool:
        """Whether a chain has a rule of this text, even if it has others that iptables cannot show.

        Takes some milliseconds. Raises as `has_chain` does.
        """
        argv = (self.tools.main, *_waiting(self.tools), "-t", key.table, "-C", key.chain, *shlex.split(rule))
        outcome = self.runner.run(argv, seconds=self.seconds)
        if outcome.exit_code in (0, 1):
            return outcome.exit_code == 0
        raise explain(self.tools.main, outcome.exit_code, outcome.stderr, "", self.runner.lock_file)

    def restore(self, text: str | Iterable[str]) -> None:
        """Have iptables-restore carry out `text`, block by block, leaving everything it does not name alone.

        Text in pieces, of which none goes beyond the end of a block, is carried out while they are made; they are made
        again to explain a failure. Each block up to COMMIT takes effect whole or not at all; after a block that is
        refused none of the later ones is tried. Raises Refused, LockHeld, TimedOut, NotPermitted, Failed.
        """
        argv = (self.tools.restore, "--noflush", "--counters", *_waiting(self.tools))
        for number, pieces in _shares(text):
            outcome = self.runner.run(argv, pieces, self.seconds)
            if outcome.exit_code:
                *before, share = ("".join(again) for _, again in itertools.islice(_shares(text), number + 1))
                lines_before = sum(done.count("\n") for done in before)
                lock_file = self.runner.lock_file
                raise explain(argv[0], outcome.exit_code, outcome.stderr, share, lock_file, lines_before)

    def legacy_tables(self) -> frozenset[str]:
        """The tables that exist in the legacy backend of this family, found out without creating any."""
        names = self.runner.read(str(TABLES_FILE[self.family]))
        return frozenset((names or "").split())

    def _save_one(self, table: str) -> str:
        # iptables-legacy creates the table it is asked for.
        if self.backend is Backend.LEGACY and table not in self.legacy_tables():
            return ""
        return self._run_save(("-t", table))

    def _parse(self, saved: str) -> Ruleset:
        try:
            return parse(self.family, canonical(saved))
        except ValueError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: ValueError) -> Failed:
        return Failed(self.tools.save, 0, f"its output cannot be read: {error}")

    def _rules(self, key: ChainKey) -> tuple[str, ...] | None:
        """The rules of one chain; None if there is none."""
        outcome = self._list(key)
        if outcome.exit_code == 0:
            lines = canonical(outcome.stdout).splitlines()
            return tuple(line.removeprefix(f"-A {key.chain} ") for line in lines if line.startswith("-A "))
        unclear = "is incompatible" in outcome.stderr
        if unclear and key.chain in BUILT_IN:
            raise Unreadable(self.tools.main, outcome.exit_code, outcome.stderr.strip())
        if unclear or _NO_CHAIN in outcome.stderr:
            return None
        raise explain(self.tools.main, outcome.exit_code, outcome.stderr, "", self.runner.lock_file)

    def _list(self, key: ChainKey, *options: str) -> Outcome:
        argv = (self.tools.main, *_waiting(self.tools), "-t", key.table, *options, "-S", key.chain)
        return self.runner.run(argv, seconds=self.seconds)

    def _run_save(self, arguments: tuple[str, ...]) -> str:
        outcome = self.runner.run((self.tools.save, *arguments), seconds=self.seconds)
        if "Permission denied" in outcome.stderr:
            raise NotPermitted(self.tools.save, outcome.stderr.strip())
        if outcome.exit_code:
            raise Failed(self.tools.save, outcome.exit_code, outcome.stderr.strip())
        # The pattern alone would take its time over a large table.
        if " is incompatible" in outcome.stdout and (match := _UNREADABLE.search(outcome.stdout)):
            raise Unreadable(self.tools.save, 0, f"{match[1]} It holds rules that iptables cannot show.")
        return outcome.stdout


def open_iptables(
    backend: Backend, family: Family, runner: Runner | None = None, seconds: float = 60
) -> Iptables:
    """The tables of a family in a backend, none touched yet. Raises Missing without the commands for it."""
    runner = runner or Runner()
    return Iptables(find_tools(backend, family, runner), runner, seconds)


def canonical(saved: str) -> str:
    """The output of iptables-save in the form in which we write rules, whatever the version that printed it.

    A rule written in this form reads back byte for byte on both backends. What is undone: the second space that
    iptables prints before the name of an nfacct object, and the one that nft up to 1.8.7 prints after a rule
    without a target. Line breaks in the comments of others become spaces, so that a rule is a line and nothing
    in a comment can pass for one.
    """
    saved = _BROKEN_COMMENT.sub(lambda comment: _BREAK.sub(" ", comment[0]), saved)
    return saved.replace("--nfacct-name  ", "--nfacct-name ").replace(" \n", "\n")


def _shares(text: str | Iterable[str]) -> Iterator[tuple[int, Iterator[str]]]:
    """The share of each command in the blocks of `text`, numbered; to be read before the next one is asked for."""
    ended = 0

    def share(piece: str) -> int:
        nonlocal ended
        number = ended // _BLOCKS_PER_COMMAND
        ended += piece.endswith(_END_OF_BLOCK)
        return number

    return itertools.groupby(filter(None, [text] if isinstance(text, str) else text), share)


def _waiting(tools: Tools) -> tuple[str, ...]:
    """Options for the lock, which legacy alone takes: known since 1.6.2, by polling up to 1.8.7."""
    if tools.backend is Backend.NFT or tools.version < (1, 6, 2):
        return ()
    if tools.version < (1, 8, 8):
        return ("-w", str(LOCK_SECONDS), "-W", str(_POLL_MICROSECONDS))
    return ("-w", str(LOCK_SECONDS))
