"""`pykubeproxy status`: how the agent of this node is, in the terminal."""

import textwrap
from collections.abc import Iterator

import click
import msgspec

from pykubeproxy.agent.observe.status import Status, decode
from pykubeproxy.agent.observe.status_text import (
    SET_ASIDE,
    aside_in_words,
    duration,
    family_state,
    health,
    kind_of,
    pending,
    typical,
    unwatched,
)
from pykubeproxy.cli.asking import DEFAULT_URL, NoAnswer, ask
from pykubeproxy.cli.output import echo_styled, output_option
from pykubeproxy.inspect.forms import WIDTH

_SYNCS, _ASIDE, _REPAIRS = 5, 10, 3


@click.command(short_help="Show how the agent that runs on this node is.")
@click.option(
    "--url",
    default=DEFAULT_URL,
    show_default=True,
    metavar="URL",
    help="The agent's metrics address.",
)
@output_option
def status(url: str, output: str) -> None:
    """Show how the agent that runs on this node is: health, what it serves, its last syncs and what waits.

    The exit code is 0 if it is healthy, 1 if it is not or does not answer. The same is to be seen in a browser at
    /statusz of its metrics address, with the services and their endpoints; -o json has those as well.

    \b
    pykubeproxy status
    pykubeproxy status --url http://192.168.99.10:10249 -o json
    """
    try:
        body = ask(url, "/statusz") if output == "json" else ask(url, "/statusz", limit="0")
    except NoAnswer as error:
        raise click.ClickException(f"{error} (--url names its metrics address)") from None
    try:
        told = decode(body)
    except ValueError as error:
        raise click.ClickException(
            f"what answers at {url} is no agent of this version of pykubeproxy: {error}"
        ) from None
    if output == "json":
        click.echo(msgspec.json.format(body).decode(errors="replace"))
    else:
        lines = "".join(f"{line}\n" for line in _lines(told))
        echo_styled(lines)
    raise SystemExit(0 if told.healthy else 1)


def _lines(told: Status) -> Iterator[str]:
    """What there is to say, in 80 columns."""
    up = duration(max(0.0, told.now - told.started))
    yield f"{click.style(told.node, bold=True)}  {told.version}, backend {told.backend}, up {up}"
    yield from _wrapped(health(told), "green" if told.healthy and not told.unwatched else "red")
    if away := unwatched(told):
        yield from _wrapped(away, "red")
    yield ""
    yield f"{'FAMILY':<8}{'STATE':<18}{'SERVICES':>9}{'ENDPOINTS':>11}{'RULES':>9}  LAST UPDATED"
    for family in told.families:
        updated = f"{duration(told.now - family.last_updated)} ago" if family.last_updated else "never"
        state = family_state(family)
        shade = "green" if state == "up to date" else "red"
        yield (
            f"{family.family:<8}{click.style(f'{state:<18}', fg=shade)}{family.services:>9}"
            f"{family.endpoints:>11}{sum(family.rules.values()):>9}  {updated}"
        )
    yield from _set_aside(told)
    yield from _repairs(told)
    for name, reason in told.lacking.items():
        yield from _wrapped(f"{name} is left out: {reason}", None)
    yield ""
    yield from _syncs(told)
    yield from _wrapped(pending(told) or "Nothing waits for the next sync.", None)


def _set_aside(told: Status) -> Iterator[str]:
    aside = [(family.family, it) for family in told.families for it in family.set_aside]
    if not aside:
        return
    yield ""
    yield from _wrapped(f"Set aside: {len(aside)}. {SET_ASIDE}", "red")
    for family, it in aside[:_ASIDE]:
        since = f"{duration(max(0.0, told.now - it.since))} ago"
        yield f"  {click.style(it.title, bold=True)}  {it.protocol} {family}, {since}"
        yield from _wrapped(aside_in_words(it), None, " " * 4)
    if len(aside) > _ASIDE:
        yield f"  and {len(aside) - _ASIDE} more (-o json has them all)"


def _repairs(told: Status) -> Iterator[str]:
    if not told.repairs:
        return
    yield ""
    yield from _wrapped("Others changed our rules, which were then put right:", None)
    for repair in reversed(told.repairs[-_REPAIRS:]):
        ago = f"{duration(max(0.0, told.now - repair.time))} ago"
        yield f"  {ago:<16}{repair.family:<6}in {duration(repair.seconds)}"
        by = f" (by {', '.join(repair.writers)})" if repair.writers else ""
        yield from _wrapped(f"{repair.what}{by}", None, " " * 4)


def _syncs(told: Status) -> Iterator[str]:
    if not told.syncs:
        yield "There has been no sync yet."
        return
    middle, worst = typical(told.syncs)
    yield f"Last {len(told.syncs)} syncs: median {duration(middle)}, longest {duration(worst)}"
    for sync in reversed(told.syncs[-_SYNCS:]):
        ago = f"{duration(max(0.0, told.now - sync.time))} ago"
        yield (
            f"  {ago:<16}{sync.family:<6}{kind_of(sync):<17}{duration(sync.seconds):>9}  {sync.rules} rules"
        )
        if sync.failure:
            yield from _wrapped(sync.failure, "red", " " * 4)


def _wrapped(text: str, color: str | None, indent: str = "") -> Iterator[str]:
    lines = textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return (click.style(line, fg=color) for line in lines)
