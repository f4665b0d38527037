"""`pykubeproxy cleanup`: takes out of the tables all that a proxy has put there."""

from collections.abc import Iterable, Iterator

import click
import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.cli.output import echo_json, output_option
from pykubeproxy.inspect.ruleset_forms import chain_entry
from pykubeproxy.kernel import (
    AlreadyRunning,
    Backend,
    Failed,
    InstanceLock,
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


@click.command(short_help="Take all chains and jumps of the service proxy out again.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("-v", "--verbose", is_flag=True, help="Print the input for iptables-restore as well.")
@output_option
def cleanup(dry_run: bool, verbose: bool, output: str) -> None:
    """Take out all chains and jumps of the service proxy, kube-proxy's too, and nothing else.

    Looks at both backends, nft and legacy, and at both families. Rules of others keep their place, and the
    chain KUBE-FIREWALL, which is the kubelet's, stays. Stop the proxy first: while pykubeproxy runs nothing is done, and
    kube-proxy would write its rules again.

    \b
    See what would go:  pykubeproxy cleanup --dry-run
    Take it out:        sudo pykubeproxy cleanup
    """
    told = output == "json"
    well = clean_up(dry_run, verbose, as_json=told) if dry_run else clean_up_alone(verbose, told)
    if not well:
        raise SystemExit(1)


def clean_up_alone(verbose: bool = False, as_json: bool = False) -> bool:
    """Do it while no agent of this network namespace runs, which would write its rules again within a second.

    Raises ClickException if one does.
    """
    try:
        with InstanceLock():
            return clean_up(verbose=verbose, as_json=as_json)
    except AlreadyRunning as error:
        raise click.ClickException(str(error)) from None


class Cleaned(msgspec.Struct, frozen=True):
    """What was done, or would be, to the tables of one backend and family; `failure` is why it was not, or ""."""

    iptables: Iptables
    what: Removal = Removal()
    text: str = ""
    failure: str = ""


def clean_up(
    dry_run: bool = False, verbose: bool = False, runner: Runner | None = None, as_json: bool = False
) -> bool:
    """Do it, or only say what would be done, for each backend and family; returns whether all went well.

    Says on standard output what was done, and on standard error what could not be; or all of it as a document. Raises
    ClickException when nothing can be done at all: without permission, or without iptables.
    """
    everywhere = list(_installed(runner or Runner()))
    if not everywhere:
        raise click.ClickException(str(Missing("iptables-restore", PACKAGE)))
    done = []
    for iptables in everywhere:
        cleaned = _clean(iptables, dry_run)
        if not as_json:
            _say(cleaned, dry_run, verbose)
        done.append(cleaned)
    well = not any(it.failure for it in done)
    if as_json:
        echo_json(document(done, dry_run))
    elif well and all(it.what.is_empty() for it in done):
        click.echo("There is nothing to do.")
    return well


def document(done: Iterable[Cleaned], dry_run: bool) -> dict[str, object]:
    """What was done as a document for JSON, of version pykubeproxy/v1.

    {"apiVersion", "dryRun": bool,
     "tables": [{"backend": "nft" or "legacy", "family",
       "jumps": [{"table", "chain", "rule"}] that lead from the kernel's own chains to a proxy's,
       "chains": [{"table", "chain"}] that are taken out,
       "kept": [{"table", "chain"}] that rules of others jump to, so that they are only emptied,
       "input": for iptables-restore, "error": why it was not done, or null}]}

    There is an entry in "tables" for each backend and family whose commands are installed. Keys may be added.
    """
    return {
        "apiVersion": API_VERSION,
        "dryRun": dry_run,
        "tables": [
            {
                "backend": it.iptables.backend.value,
                "family": it.iptables.family.value,
                "jumps": [{**chain_entry(key), "rule": rule} for key, rule in it.what.jumps],
                "chains": [chain_entry(key) for key in it.what.deleted],
                "kept": [chain_entry(key) for key in it.what.kept],
                "input": it.text,
                "error": it.failure or None,
            }
            for it in done
        ],
    }


def _installed(runner: Runner) -> Iterator[Iptables]:
    for backend in Backend:
        for family in Family:
            try:
                yield open_iptables(backend, family, runner)
            except Missing:
                continue


def _clean(iptables: Iptables, dry_run: bool) -> Cleaned:
    """Clean one backend and family. Raises ClickException without permission."""
    try:
        what = removal(_live(iptables))
        text = what.restore_input(NFT_CHAINS_PER_BLOCK if iptables.backend is Backend.NFT else None)
        if text and not dry_run:
            iptables.restore(text)
    except NotPermitted as error:
        raise click.ClickException(str(error)) from None
    except KernelError as error:
        return Cleaned(iptables, failure=str(error))
    return Cleaned(iptables, what, text)


def _say(cleaned: Cleaned, dry_run: bool, verbose: bool) -> None:
    what, place = cleaned.what, _place(cleaned.iptables)
    if cleaned.failure:
        click.echo(f"Error: {place}: {cleaned.failure}", err=True)
    if verbose:
        click.echo(cleaned.text, nl=False)
    if what.jumps or what.deleted:
        click.echo(f"{place}: {_in_words(what)} {'would be removed' if dry_run else 'removed'}")
    for key in what.kept:
        click.echo(
            f"Warning: {place}: rules of others jump to {key.chain} in table {key.table}, "
            f"so it {'would only be' if dry_run else 'was only'} emptied",
            err=True,
        )


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
