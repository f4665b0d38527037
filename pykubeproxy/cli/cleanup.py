"""`pykubeproxy cleanup`: remove all service-proxy rules from the tables."""

from collections.abc import Iterable, Iterator

import click
import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.cli.flags import output_option
from pykubeproxy.cli.terminal import click_errors, echo_json
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
    has_nat,
    open_iptables,
)
from pykubeproxy.kernel.tools import PACKAGE
from pykubeproxy.objects import Family
from pykubeproxy.rules.blocks import NFT_CHAINS_PER_BLOCK
from pykubeproxy.rules.removal import Removal, removal
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.wording import counted, listed


@click.command(short_help="Remove all service-proxy chains and jumps.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and change nothing.")
@click.option("-v", "--verbose", is_flag=True, help="Print the input for iptables-restore too.")
@output_option
def cleanup(dry_run: bool, verbose: bool, output: str) -> None:
    """Remove all service-proxy chains and jumps, including those of kube-proxy, and nothing else.

    Clean both backends, nft and legacy, and both address families. Foreign rules and the kubelet's chain KUBE-FIREWALL
    stay. Stop the proxy first: this command refuses to run beside pykubeproxy, and kube-proxy rewrites its rules.

    \b
    sudo pykubeproxy cleanup --dry-run
    sudo pykubeproxy cleanup
    """
    as_json = output == "json"
    if not (clean_up(True, verbose, as_json=as_json) if dry_run else clean_up_alone(verbose, as_json)):
        raise SystemExit(1)


def clean_up_alone(verbose: bool = False, as_json: bool = False) -> bool:
    """Clean up while holding the instance lock. Raises ClickException if an agent runs in this network namespace."""
    with click_errors(AlreadyRunning), InstanceLock():
        return clean_up(verbose=verbose, as_json=as_json)


class Cleaned(msgspec.Struct, frozen=True):
    """The removal from the tables of one backend and family; `failure` is "" or why it failed."""

    iptables: Iptables
    removed: Removal = Removal()
    text: str = ""
    failure: str = ""


def clean_up(
    dry_run: bool = False, verbose: bool = False, runner: Runner | None = None, as_json: bool = False
) -> bool:
    """Clean up each backend and family, or print what would be removed; return whether everything succeeded.

    Print results to standard output and failures to standard error, or everything as one JSON document. Raise
    ClickException without permission or without iptables.
    """
    installed = list(_installed(runner or Runner()))
    if not installed:
        raise click.ClickException(str(Missing("iptables-restore", PACKAGE)))
    results = []
    for iptables in installed:
        results.append(_clean(iptables, dry_run))
        if not as_json:
            _print(results[-1], dry_run, verbose)
    succeeded = not any(it.failure for it in results)
    if as_json:
        echo_json(document(results, dry_run))
    elif succeeded and all(it.removed.is_empty() for it in results):
        click.echo("Nothing to remove.")
    return succeeded


def document(results: Iterable[Cleaned], dry_run: bool) -> dict[str, object]:
    """The results as a JSON document of version pykubeproxy/v1.

    {"apiVersion", "dryRun": bool,
     "tables": [{"backend": "nft" or "legacy", "family",
       "jumps": [{"table", "chain", "rule"}], removed from built-in chains,
       "chains": [{"table", "chain"}], removed,
       "kept": [{"table", "chain"}], only emptied because foreign rules jump to them,
       "input": for iptables-restore, "error": why the removal failed, or null}]}

    "tables" has an entry for each backend and family whose commands are installed. Keys may be added.
    """
    return {
        "apiVersion": API_VERSION,
        "dryRun": dry_run,
        "tables": [
            {
                "backend": it.iptables.backend.value,
                "family": it.iptables.family.value,
                "jumps": [{**key._asdict(), "rule": rule} for key, rule in it.removed.jumps],
                "chains": [key._asdict() for key in it.removed.deleted],
                "kept": [key._asdict() for key in it.removed.kept],
                "input": it.text,
                "error": it.failure or None,
            }
            for it in results
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
        found = removal(_live(iptables))
        text = found.restore_input(NFT_CHAINS_PER_BLOCK if iptables.backend is Backend.NFT else None)
        if text and not dry_run:
            iptables.restore(text)
    except NotPermitted as error:
        raise click.ClickException(str(error)) from None
    except KernelError as error:
        return Cleaned(iptables, failure=str(error))
    return Cleaned(iptables, found, text)


def _print(cleaned: Cleaned, dry_run: bool, verbose: bool) -> None:
    removed = cleaned.removed
    tables = f"{cleaned.iptables.backend.value}, {cleaned.iptables.family.value}"
    if cleaned.failure:
        click.echo(f"Error: {tables}: {cleaned.failure}", err=True)
    if verbose:
        click.echo(cleaned.text, nl=False)
    counts = ((len(removed.jumps), "jump"), (len(removed.deleted), "chain"))
    if counts_text := listed(counted(number, noun) for number, noun in counts if number):
        click.echo(f"{tables}: {counts_text} {'would be removed' if dry_run else 'removed'}")
    for key in removed.kept:
        click.echo(
            f"Warning: {tables}: foreign rules jump to chain {key.chain} of table {key.table},"
            f" so it {'would only be' if dry_run else 'was only'} emptied; remove those rules first",
            err=True,
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
