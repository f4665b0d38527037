"""`pykubeproxy dump-rules`: the live tables of this node as people think of them."""

import os
from collections.abc import Sequence
from typing import Literal

import click
import msgspec
import yaml

from pykubeproxy import kernel
from pykubeproxy.inspect import forms
from pykubeproxy.inspect.dump import ServiceView, views
from pykubeproxy.inspect.listing import listing
from pykubeproxy.inspect.wanted import Wanted, parse_wanted
from pykubeproxy.kernel import Backend, KernelError
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import Counters, Ruleset

_FAMILIES = {family.value.lower(): family for family in Family}
_Live = Sequence[tuple[Ruleset, Counters]]


@click.command("dump-rules")
@click.argument("service", default="")
@click.option("-n", "--namespace", default="", help="Only services of this namespace.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "yaml", "iptables"]),
    default="table",
    show_default=True,
    help="iptables: the rules themselves, in the order a packet meets them.",
)
@click.option("--family", type=click.Choice(list(_FAMILIES)), help="Only this family; else both.")
@click.option(
    "--iptables-backend",
    type=click.Choice(["auto", "nft", "legacy"]),
    default="auto",
    show_default=True,
    help="Where to look; auto: where this node's rules are.",
)
def dump_rules(
    service: str,
    namespace: str,
    output: str,
    family: str | None,
    iptables_backend: Literal["auto", "nft", "legacy"],
) -> None:
    """Show what this node's iptables rules do with SERVICE, or with all services.

    SERVICE is a name, namespace/name, or either with :port, a port's name or number. For each port the addresses
    that lead to it, and the endpoints with the share of new connections that each gets. Reads the rules of
    kube-proxy as well as our own, whether an agent runs or not, and changes nothing.

    \b
    pykubeproxy dump-rules
    pykubeproxy dump-rules default/web:http -o iptables
    """
    try:
        wanted = parse_wanted(service, namespace)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    families = tuple(_FAMILIES.values()) if family is None else (_FAMILIES[family],)
    try:
        backend = kernel.choose(iptables_backend)
        live = _read(backend, families, required=family is not None)
    except KernelError as error:
        raise click.ClickException(str(error)) from None
    found = forms.in_order(view for tables in live for view in views(*tables, wanted))
    if not found:
        _nothing(wanted, backend, service)
    click.echo(
        _text(output, found, live, wanted), nl=False, color=False if "NO_COLOR" in os.environ else None
    )


def _read(backend: Backend, families: Sequence[Family], required: bool) -> _Live:
    """The live tables of the families; one that this node does not have is left out, unless it is required."""
    live = []
    for family in families:
        try:
            live.append(kernel.open_iptables(backend, family).save_counted())
        except KernelError as error:
            if required or isinstance(error, kernel.NotPermitted) or not _dispensable(backend, family, error):
                raise
    return live


def _dispensable(backend: Backend, family: Family, error: KernelError) -> bool:
    return isinstance(error, kernel.Missing) or bool(kernel.unavailable(backend, family))


def _nothing(wanted: Wanted, backend: Backend, service: str) -> None:
    """Say on standard error that there is nothing to show. Raises ClickException if a service was asked for."""
    where = f"in the {backend.value} tables of this node"
    if service:
        raise click.ClickException(f"there are no rules for {wanted} {where}")
    of = f" of namespace {wanted.namespace}" if wanted.namespace else ""
    click.echo(f"There are no rules for services{of} {where}.", err=True)


def _text(output: str, found: Sequence[ServiceView], live: _Live, wanted: Wanted) -> str:
    match output:
        case "json":
            return msgspec.json.format(msgspec.json.encode(forms.document(found))).decode() + "\n"
        case "yaml":
            return yaml.safe_dump(forms.document(found), sort_keys=False, allow_unicode=True)
        case "iptables":
            texts = ((ruleset.family, listing(ruleset, wanted)) for ruleset, _ in live)
            return "\n".join(f"# {family.value}\n{text}" for family, text in texts if text)
        case _:
            return forms.table(found)
