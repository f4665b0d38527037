"""`pykubeproxy cleanup`: remove all service-proxy rules from the tables."""

from collections.abc import Iterator

import click

from pykubeproxy.cli.emit import DOCUMENTS, emit, report_option
from pykubeproxy.cli.help import ACTION, FAILED, OUTPUT, command, option
from pykubeproxy.cli.terminal import click_errors, echo_line
from pykubeproxy.inspect.cleanup import (
    CleanedChain,
    CleanedObjects,
    CleanedTables,
    CleanupReport,
    RemovedJump,
)
from pykubeproxy.kernel import (
    AlreadyRunning,
    Backend,
    Failed,
    InstanceLock,
    Iptables,
    KernelError,
    Missing,
    NoLock,
    NotANode,
    NotPermitted,
    Runner,
    has_nat,
    leftovers,
    open_iptables,
    require_node,
)
from pykubeproxy.kernel.iptables import PACKAGE
from pykubeproxy.kernel.system import routes_loopback
from pykubeproxy.objects import Family
from pykubeproxy.rules.plan import NFT_CHAINS_PER_BLOCK
from pykubeproxy.rules.removal import kubelet_guards_loopback, removal
from pykubeproxy.rules.ruleset import Ruleset


@command(failure=FAILED, short_help="Remove all service-proxy chains and jumps.")
@option("--dry-run", is_flag=True, help="Print what would be removed, and change nothing.", group=ACTION)
@option(
    "--all-modes",
    is_flag=True,
    help="Remove what kube-proxy's ipvs and nftables modes left, too.",
    group=ACTION,
)
@option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Print the input for iptables-restore and all names too, as -o wide does.",
    group=OUTPUT,
)
@report_option()
@click_errors(NotANode)
def cleanup(dry_run: bool, all_modes: bool, verbose: bool, output: str) -> None:
    """Remove all service-proxy chains and jumps, including those of kube-proxy, and nothing else.

    Clean both backends, nft and legacy, and both address families. Foreign rules stay, and so does KUBE-FIREWALL if the
    kubelet uses it or if nothing else protects loopback addresses. Stop the proxy first: this command refuses to run
    beside pykubeproxy, and kube-proxy rewrites its rules.

    With --all-modes, also remove IPVS virtual servers, the interface kube-ipvs0, ipsets, and nftables tables of
    kube-proxy. Virtual servers of other programs stay.

    \b
    sudo pykubeproxy cleanup --dry-run
    sudo pykubeproxy cleanup
    sudo pykubeproxy cleanup --all-modes
    """
    require_node()
    if verbose and output == "text":
        output = "wide"
    if dry_run:
        succeeded = clean_up(True, output, all_modes=all_modes)
    else:
        succeeded = clean_up_alone(output, all_modes)
    if not succeeded:
        raise SystemExit(1)


def clean_up_alone(output: str = "text", all_modes: bool = False) -> bool:
    """Clean up while holding the instance lock. Raises ClickException if an agent runs in this network namespace."""
    with click_errors(AlreadyRunning, NoLock), InstanceLock():
        return clean_up(output=output, all_modes=all_modes)


@click_errors(NotPermitted)
def clean_up(
    dry_run: bool = False,
    output: str = "text",
    runner: Runner | None = None,
    all_modes: bool = False,
) -> bool:
    """Clean up each backend and family, or print what would be removed; return whether everything succeeded.

    Print results to standard output and failures to standard error, or everything in one document. Raise ClickException
    without permission, or without iptables unless other modes remain to be cleaned.
    """
    live = [(iptables, _read(iptables)) for iptables in _installed(runner or Runner())]
    no_iptables = "" if live else str(Missing("iptables-restore", PACKAGE))
    if no_iptables and not all_modes:
        raise click.ClickException(no_iptables)
    guarded = not routes_loopback() or any(
        kubelet_guards_loopback(rules) for _, rules in live if isinstance(rules, Ruleset)
    )
    # Virtual servers take precedence over rules, and rules refer to ipsets.
    first = (leftovers.remove_virtual_servers, leftovers.remove_interface) if all_modes else ()
    last = (leftovers.remove_ipsets, leftovers.remove_nftables_tables) if all_modes else ()
    others = [remove(dry_run) for remove in first]
    results = [_clean(iptables, rules, guarded, all_modes, dry_run) for iptables, rules in live]
    others += [remove(dry_run) for remove in last]
    done = CleanupReport(
        dry_run=dry_run,
        tables=results,
        other_modes=[
            CleanedObjects(
                found.mode, found.kind, found.names, found.addresses, found.kept, found.failure or None
            )
            for found in others
        ],
    )
    emit(done, output)
    problems = [] if output in DOCUMENTS else [*done.problems()]
    for line in (*problems, *([f"Error: {no_iptables}"] if no_iptables else [])):
        echo_line(line, err=True)
    return done.succeeded and not no_iptables


def _installed(runner: Runner) -> Iterator[Iptables]:
    for backend in Backend:
        for family in Family:
            try:
                yield open_iptables(backend, family, runner)
            except Missing:
                continue


def _read(iptables: Iptables) -> Ruleset | KernelError:
    """Return the live tables, or why they cannot be read. Raises NotPermitted."""
    try:
        return _live(iptables)
    except NotPermitted:
        raise
    except KernelError as error:
        return error


def _clean(
    iptables: Iptables, rules: Ruleset | KernelError, guarded: bool, all_modes: bool, dry_run: bool
) -> CleanedTables:
    """Clean one backend and family. Raises NotPermitted."""
    backend = iptables.backend.value
    try:
        if isinstance(rules, KernelError):
            raise rules
        found = removal(rules, loopback_guarded=guarded, all_modes=all_modes)
        text = found.restore_input(NFT_CHAINS_PER_BLOCK if iptables.backend is Backend.NFT else None)
        if text and not dry_run:
            iptables.restore(text)
    except NotPermitted:
        raise
    except KernelError as error:
        return CleanedTables(backend, iptables.family, error=str(error))
    return CleanedTables(
        backend,
        iptables.family,
        jumps=[RemovedJump(*key, rule) for key, rule in found.jumps],
        chains=[CleanedChain(*key) for key in found.deleted],
        kept=[CleanedChain(*key) for key in found.kept],
        guard_stays=found.guard_stays,
        input=text,
    )


def _live(iptables: Iptables) -> Ruleset:
    """Return the live tables; empty if this kernel does not support the family or backend."""
    nothing = Ruleset(iptables.family, {})
    # Without legacy tables iptables-legacy-save fails.
    if iptables.backend is Backend.LEGACY and not iptables.legacy_tables():
        return nothing
    try:
        return iptables.save()
    except Failed:
        if not has_nat(iptables.backend, iptables.family):
            return nothing
        raise
