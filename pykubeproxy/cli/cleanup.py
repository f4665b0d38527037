"""`pykubeproxy cleanup`: takes out of the tables all that a proxy has put there."""

from collections.abc import Iterator

import click

from pykubeproxy.kernel import (
    Backend,
    Failed,
    Iptables,
    KernelError,
    Missing,
    NotPermitted,
    Runner,
    open_iptables,
    unavailable,
)
from pykubeproxy.kernel.tools import PACKAGE
from pykubeproxy.objects import Family
from pykubeproxy.rules.plan import NFT_CHAINS_PER_BLOCK
from pykubeproxy.rules.removal import Removal, removal
from pykubeproxy.rules.ruleset import Ruleset


@click.command()
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("-v", "--verbose", is_flag=True, help="Print the input for iptables-restore as well.")
def cleanup(dry_run: bool, verbose: bool) -> None:
    """Take out all chains and jumps of the service proxy, kube-proxy's too, and nothing else.

    Looks at both backends, nft and legacy, and at both families. Rules of others keep their place, and the
    chain KUBE-FIREWALL, which is the kubelet's, stays. Stop the proxy first, or it will write its rules again.

    \b
    See what would go:  pykubeproxy cleanup --dry-run
    Take it out:        sudo pykubeproxy cleanup
    """
    if not clean_up(dry_run, verbose):
        raise SystemExit(1)


def clean_up(dry_run: bool = False, verbose: bool = False, runner: Runner | None = None) -> bool:
    """Do it, or only say what would be done, for each backend and family; returns whether all went well.

    Says on standard output what was done, and on standard error what could not be. Raises ClickException when
    nothing can be done at all: without permission, or without iptables.
    """
    everywhere = list(_installed(runner or Runner()))
    if not everywhere:
        raise click.ClickException(str(Missing("iptables-restore", PACKAGE)))
    found, well = False, True
    for iptables in everywhere:
        try:
            found = _clean(iptables, dry_run, verbose) or found
        except NotPermitted as error:
            raise click.ClickException(str(error)) from None
        except KernelError as error:
            click.echo(f"Error: {_place(iptables)}: {error}", err=True)
            well = False
    if well and not found:
        click.echo("There is nothing to do.")
    return well


def _installed(runner: Runner) -> Iterator[Iptables]:
    for backend in Backend:
        for family in Family:
            try:
                yield open_iptables(backend, family, runner)
            except Missing:
                continue


def _clean(iptables: Iptables, dry_run: bool, verbose: bool) -> bool:
    """Clean one backend and family; returns whether there was anything to do."""
    what = removal(_live(iptables))
    if not what.is_empty():
        text = what.restore_input(NFT_CHAINS_PER_BLOCK if iptables.backend is Backend.NFT else None)
        if verbose:
            click.echo(text, nl=False)
        if not dry_run:
            iptables.restore(text)
        if what.jumps or what.deleted:
            done = "would be removed" if dry_run else "removed"
            click.echo(f"{_place(iptables)}: {_in_words(what)} {done}")
    for key in what.kept:
        click.echo(
            f"Warning: {_place(iptables)}: rules of others jump to {key.chain} in table {key.table}, "
            f"so it {'would only be' if dry_run else 'was only'} emptied",
            err=True,
        )
    return not what.is_empty()


def _live(iptables: Iptables) -> Ruleset:
    """The live tables; none of a family or backend that this kernel does not have."""
    nothing = Ruleset(iptables.family, {})
    # Looking at legacy fails on kernels without it.
    if iptables.backend is Backend.LEGACY and not iptables.legacy_tables():
        return nothing
    try:
        return iptables.save()
    except Failed:
        if unavailable(iptables.backend, iptables.family):
            return nothing
        raise


def _place(iptables: Iptables) -> str:
    return f"{iptables.backend.value}, {iptables.family.value}"


def _in_words(what: Removal) -> str:
    """Such as "12 jumps and 420 chains"."""
    counted = ((len(what.jumps), "jump"), (len(what.deleted), "chain"))
    return " and ".join(f"{number} {noun}{'s' * (number != 1)}" for number, noun in counted if number)
