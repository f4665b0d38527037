"""`pykubeproxy status`: how the agent of this node is, in the terminal."""

import os
import textwrap
from collections.abc import Iterator
from urllib.parse import urlsplit

import click
import msgspec
import urllib3

from pykubeproxy.agent.status import Status, decode
from pykubeproxy.agent.status_page import duration, family_state, health, kind_of, pending, typical
from pykubeproxy.inspect.forms import WIDTH

_TIMEOUT = urllib3.Timeout(connect=3, read=10)  # seconds
# What is read at most, in bytes, of what answers there.
_LONGEST = 16 << 20
_SYNCS = 5


@click.command()
@click.option(
    "--url",
    default="http://127.0.0.1:10249",
    show_default=True,
    metavar="URL",
    help="The agent's metrics address.",
)
@click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="The form."
)
def status(url: str, output: str) -> None:
    """Show how the agent that runs on this node is: health, what it serves, its last syncs and what waits.

    The exit code is 0 if it is healthy, 1 if it is not or does not answer. The same is to be seen in a browser at
    /statusz of its metrics address, with the services and their endpoints; -o json has those as well.

    \b
    pykubeproxy status
    pykubeproxy status --url http://192.168.99.10:10249 -o json
    """
    body = _fetch(url, services=output == "json")
    try:
        told = decode(body)
    except ValueError as error:
        raise click.ClickException(
            f"what answers at {url} is no agent of this version of pykubeproxy: {error}"
        ) from None
    if output == "json":
        click.echo(msgspec.json.format(body).decode())
    else:
        lines = "".join(f"{line}\n" for line in _lines(told))
        click.echo(lines, nl=False, color=False if "NO_COLOR" in os.environ else None)
    raise SystemExit(0 if told.healthy else 1)


def _fetch(url: str, services: bool) -> bytes:
    """The agent's answer. Raises ClickException."""
    page = _page(url) + ("" if services else "?limit=0")
    try:
        with urllib3.PoolManager() as pool:
            answer = pool.request(
                "GET",
                page,
                headers={"Accept": "application/json"},
                timeout=_TIMEOUT,
                retries=False,
                preload_content=False,
            )
            body: bytes = answer.read(_LONGEST)
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise click.ClickException(
            f"no agent answers at {url}: {_reason(error)} (--url names its metrics address)"
        ) from None
    if answer.status != 200:
        raise click.ClickException(f"{page} answers with status {answer.status}")
    return body


def _page(url: str) -> str:
    """The address of the agent's page. Raises UsageError."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return f"{parts.scheme}://{parts.netloc}/statusz"
    except ValueError:
        pass
    raise click.UsageError(f'"{url}" is not of the form http://address:port')


def _reason(error: Exception) -> str:
    """The innermost reason, in the system's words where it has some."""
    while (inner := error.__cause__ or error.__context__) and isinstance(inner, Exception):
        error = inner
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__


def _lines(told: Status) -> Iterator[str]:
    """What there is to say, in 80 columns."""
    up = duration(max(0.0, told.now - told.started))
    yield f"{click.style(told.node, bold=True)}  {told.version}, backend {told.backend}, up {up}"
    yield from _wrapped(health(told), "green" if told.healthy else "red")
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
    for name, reason in told.lacking.items():
        yield from _wrapped(f"{name} is left out: {reason}", None)
    yield ""
    yield from _syncs(told)
    yield from _wrapped(pending(told) or "Nothing waits for the next sync.", None)


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
