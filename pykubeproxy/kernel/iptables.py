"""The commands of iptables: find them, choose their backend, read and write the tables of one family.

iptables-save reads, and only iptables-restore writes.
"""

import enum
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

import msgspec

from pykubeproxy.kernel import nftables
from pykubeproxy.kernel.errors import Failed, KernelError, Missing, NotPermitted, Unreadable
from pykubeproxy.kernel.legacy import TABLES_FILE, entries
from pykubeproxy.kernel.restore import IptablesSession, RestoreSession, explain
from pykubeproxy.kernel.runner import CommandResult, Runner
from pykubeproxy.objects import Family
from pykubeproxy.rules.iptables_save import canonical, parse, read_counted
from pykubeproxy.rules.ruleset import BUILT_IN, KUBELET_HINTS, ChainKey, Counters, Ruleset

_VERSION = re.compile(r"v(\d+)\.(\d+)\.(\d+)(?:\s+\((\w+)\))?")
_PROGRAM = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}
PACKAGE = "iptables (on some distributions iptables-nft or iptables-legacy)"
# How long legacy waits for its lock, and the interval of versions that poll for it.
LOCK_SECONDS = 5
_POLL_MICROSECONDS = 100_000
# iptables-nft-save reports this in a comment, omits the table, and exits with 0.
_UNREADABLE = re.compile(r"^# (Table `\w+' is incompatible.*)$", re.MULTILINE)
_NO_CHAIN = "No chain/target/match by that name"
# Above this many chains it is faster to read whole tables.
_MOST_CHAINS = 20
# With more entries, iptables-legacy takes 0.1 s or more to look up a chain.
_LARGE = 5000
_ALL_TABLES = ("raw", "mangle", "nat", "filter", "security")
# Announces the writes of a session; yields a function to call with each text before it is written.
OwnWrites = Callable[[Family], AbstractContextManager[Callable[[str], None]]]


class Backend(enum.Enum):
    """The kernel subsystem that holds the rules: nf_tables, or the older x_tables."""

    NFT = "nft"
    LEGACY = "legacy"


class Tools(msgspec.Struct, frozen=True):
    """The commands for one backend and family, and their version such as (1, 8, 9)."""

    backend: Backend
    family: Family
    main: str
    save: str
    restore: str
    version: tuple[int, int, int]


def find_tools(backend: Backend, family: Family, runner: Runner) -> Tools:
    """Return the commands named for the backend (iptables-nft-save), else the plain ones if they use it. Raises Missing."""
    program = _PROGRAM[family]
    for stem in (f"{program}-{backend.value}", program):
        main, save, restore = stem, f"{stem}-save", f"{stem}-restore"
        if all(map(runner.has, (main, save, restore))):
            kind, version = _identify(main, runner)
            if kind is backend:
                return Tools(backend, family, main, save, restore, version)
    raise Missing(f"{program}-{backend.value}-restore", PACKAGE)


def default_backend(runner: Runner) -> Backend | None:
    """Return the backend of the plain `iptables` command, None if it is not installed."""
    main = _PROGRAM[Family.IPV4]
    return _identify(main, runner)[0] if runner.has(main) else None


def _identify(command: str, runner: Runner) -> tuple[Backend, tuple[int, int, int]]:
    outcome = runner.run((command, "--version"), seconds=10)
    match = _VERSION.search(outcome.stdout)
    if match is None:
        raise Failed(f"{command} --version", outcome.exit_code, (outcome.stderr or outcome.stdout).strip())
    # Versions before 1.8 know only legacy, and print no backend.
    backend = Backend.NFT if match[4] == "nf_tables" else Backend.LEGACY
    return backend, (int(match[1]), int(match[2]), int(match[3]))


def lock_options(tools: Tools) -> tuple[str, ...]:
    """Return the options to wait for the lock. Only legacy has one; it waits since 1.6.2, by polling until 1.8.7."""
    if tools.backend is Backend.NFT or tools.version < (1, 6, 2):
        return ()
    if tools.version < (1, 8, 8):
        return ("-w", str(LOCK_SECONDS), "-W", str(_POLL_MICROSECONDS))
    return ("-w", str(LOCK_SECONDS))


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
    own_writes: OwnWrites = lambda _: nullcontext(lambda _: None)
    """How a watch learns of each session, see `TableWatch`."""

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
        return canonical(self._list(key, "-v") or "")

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
        try:
            return self._list(key) is not None
        except Unreadable:  # iptables-nft 1.8.9 calls a missing chain incompatible
            return False

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

    @contextmanager
    def session(self, seconds: float | None = None) -> Iterator[IptablesSession]:
        """Open a session with iptables-restore, for writing while the caller renders more text.

        `seconds` limits the time without progress, if it is less than that of other commands. Raises KernelError too if
        the kernel does not answer the watch.
        """
        longest = min(seconds or self.seconds, self.seconds)
        options = lock_options(self.tools)
        try:
            with (
                self.own_writes(self.family) as note,
                IptablesSession(self.tools.restore, options, self.runner, longest, note) as session,
            ):
                yield session
        except OSError as error:
            reason = error.strerror or str(error)
            raise KernelError(f"cannot watch the tables while writing to them: {reason}") from error

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
        try:
            listed = self._list(key)
        except Unreadable:
            if key.chain in BUILT_IN:
                raise
            return None
        if listed is None:
            return None
        lines = canonical(listed).splitlines()
        return tuple(line.removeprefix(f"-A {key.chain} ") for line in lines if line.startswith("-A "))

    def _list(self, key: ChainKey, *options: str) -> str | None:
        """Return what `iptables -S` prints of a chain; None if there is none. Raises Unreadable if it cannot show it."""
        argv = (self.tools.main, *lock_options(self.tools), "-t", key.table, *options, "-S", key.chain)
        outcome = self.runner.run(argv, seconds=self.seconds)
        if outcome.exit_code == 0:
            return outcome.stdout
        if _NO_CHAIN in outcome.stderr:
            return None
        if "is incompatible" in outcome.stderr:
            raise Unreadable(self.tools.main, outcome.exit_code, outcome.stderr.strip())
        raise explain(self.tools.main, outcome.exit_code, outcome.stderr, self.runner.lock_file)

    def _run_save(self, arguments: tuple[str, ...]) -> str:
        outcome = self.runner.run((self.tools.save, *arguments), seconds=self.seconds)
        self._check_saved(outcome)
        # The pattern alone is slow over a large table.
        if " is incompatible" in outcome.stdout and (match := _UNREADABLE.search(outcome.stdout)):
            raise Unreadable(self.tools.save, 0, f"{match[1]} It holds rules that iptables cannot show.")
        return outcome.stdout

    def _check_saved(self, outcome: CommandResult) -> None:
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


def choose_backend(
    setting: Literal["auto", "nft", "legacy"], runner: Runner | None = None, holding: ChainKey | None = None
) -> Backend:
    """Return the configured backend; for `auto`, the one this node uses. Changes no table. Raises Missing.

    `auto` prefers the backend with the kubelet's hint chain, then the one with more rules, then that of the plain
    iptables command. Read-only callers may pass `holding`: if only one backend has this chain, it comes first. A large
    legacy table counts as having the chain.
    """
    runner = runner or Runner()
    if setting != "auto":
        if not _installed(Backend(setting), runner):
            raise Missing(f"iptables-{setting}-restore", PACKAGE)
        return Backend(setting)
    installed = {backend: opened for backend in Backend if (opened := _installed(backend, runner))}
    if not installed:
        raise Missing("iptables-restore", PACKAGE)
    if len(installed) == 1:
        return next(iter(installed))
    signs = [lambda iptables: _has_any((iptables,), KUBELET_HINTS), _may_have_rules]
    if holding:
        signs.insert(0, lambda iptables: _has_or_is_large(iptables, holding))
    for has_sign in signs:
        matching = [backend for backend, families in installed.items() if any(map(has_sign, families))]
        if len(matching) == 1:
            return matching[0]
    rules = {backend: sum(map(_count_rules, families)) for backend, families in installed.items()}
    if rules[Backend.NFT] != rules[Backend.LEGACY]:
        return max(rules, key=lambda backend: rules[backend])
    return default_backend(runner) or Backend.NFT


def other_backend_with_chain(used: Backend, chain: ChainKey, runner: Runner | None = None) -> Backend | None:
    """Return the other backend if either family has a chain in it too: packets then pass the rules of both.

    None if the other backend cannot be read. Changes no table.
    """
    (other,) = (backend for backend in Backend if backend is not used)
    return other if _has_any(_installed(other, runner or Runner()), (chain,)) else None


def _installed(backend: Backend, runner: Runner) -> list[Iptables]:
    """Return the families of a backend whose commands are installed."""
    opened = []
    for family in Family:
        try:
            opened.append(open_iptables(backend, family, runner))
        except Missing:
            continue
    return opened


def _has_or_is_large(iptables: Iptables, chain: ChainKey) -> bool:
    # The kernel reports the size for this namespace only.
    measurable = iptables.backend is Backend.LEGACY and not iptables.runner.prefix
    return (measurable and entries(iptables.family, chain.table) >= _LARGE) or _has_any((iptables,), (chain,))


def _may_have_rules(iptables: Iptables) -> bool:
    """Return whether tables have rules, or may have them: unlike counting, this reads no large table."""
    if iptables.runner.prefix:  # netlink and getsockopt see this namespace only
        return True
    family = iptables.family
    if iptables.backend is Backend.LEGACY:
        size = sum(entries(family, table) for table in _ALL_TABLES)
        # An empty chain has entries too.
        return size >= _LARGE or (size > 0 and _count_rules(iptables) > 0)
    try:
        return any(nftables.has_rules(family, table) for table in _ALL_TABLES)
    except OSError:
        return True


def _has_any(families: Iterable[Iptables], chains: Iterable[ChainKey]) -> bool:
    """Return whether a family has one of the chains; one that this kernel cannot read has none."""
    for iptables in families:
        for chain in chains:
            try:
                if iptables.has_chain(chain):
                    return True
            except KernelError:
                continue
    return False


def _count_rules(iptables: Iptables) -> int:
    try:
        return len(iptables.save())
    except KernelError:
        return 0
