"""`pykubeproxy status`: check agent health."""

from collections.abc import Iterator

import click
import msgspec

from pykubeproxy.agent.observe.status import Status, decode
from pykubeproxy.agent.observe.status_text import (
    QUARANTINED,
    all_well,
    duration,
    family_state,
    health,
    kind_of,
    pending,
    quarantine_reason,
    rejected_trees,
    typical,
    unwatched,
    waiting,
)
from pykubeproxy.cli.bundle_files import bundle_option, opened
from pykubeproxy.cli.client import DEFAULT_URL, NoAgent, fetch
from pykubeproxy.cli.flags import output_option
from pykubeproxy.cli.help import DIFFERENT, SOURCE, command, option
from pykubeproxy.cli.terminal import echo_json, echo_styled
from pykubeproxy.wording import styled, text_of, wrapped

_SYNCS, _QUARANTINED, _REPAIRS = 5, 10, 3


@command(
    exit_codes={0: "Healthy.", 1: "Not healthy.", 2: "Unknown: no agent answers, or wrong usage."},
    short_help="Check agent health.",
)
@option(
    "--url",
    metavar="URL",
    help=f"Metrics address of the agent, on loopback.  [default: {DEFAULT_URL}]",
    group=SOURCE,
)
@bundle_option
@output_option
def status(url: str | None, bundle_file: str | None, output: str) -> None:
    """Show the health of the agent on this node, its rules, recent syncs and pending changes.

    For services and endpoints, use -o json or open /statusz of its metrics address in a browser on the node. The agent
    answers over loopback only. With --bundle, show the health when the bundle was made.

    \b
    pykubeproxy status
    pykubeproxy status --url http://127.0.0.1:10259 -o json
    """
    if url is not None and bundle_file:
        raise click.UsageError("--bundle cannot be combined with --url; remove one of them")
    bundle = opened(bundle_file)
    if bundle:
        from pykubeproxy.cli.bundle_agent import bundled_status

        body = bundled_status(bundle)
    else:
        body = _fetched(url or DEFAULT_URL, output)
    try:
        agent = decode(body)
    except ValueError as error:
        place = f"the status in {bundle_file}" if bundle else url or DEFAULT_URL
        advice = "use the pykubeproxy that made it" if bundle else "set --url to its metrics address"
        raise click.ClickException(
            f"{place} is not an agent of this pykubeproxy version: {error}; {advice}"
        ) from None
    if output == "json":
        echo_json(msgspec.Raw(body.decode(errors="replace").encode()))
    else:
        echo_styled(text_of(_lines(agent)))
    raise SystemExit(0 if agent.healthy else DIFFERENT)


def _fetched(url: str, output: str) -> bytes:
    """Return the status of the agent at a URL. Raises ClickException."""
    try:
        return fetch(url, "/statusz") if output == "json" else fetch(url, "/statusz", limit="0")
    except NoAgent as error:
        raise click.ClickException(f"{error}; start the agent or set --url to its metrics address") from None


def _lines(agent: Status) -> Iterator[str]:
    up = duration(max(0.0, agent.now - agent.started))
    yield f"{styled(agent.node, bold=True)}  {agent.version}, backend {agent.backend}, up {up}"
    yield from _wrapped(health(agent), "green" if all_well(agent) else "red")
    if away := unwatched(agent):
        yield from _wrapped(away, "red")
    if others := waiting(agent):
        yield from _wrapped(others)
    yield ""
    yield f"{'FAMILY':<8}{'STATE':<18}{'SERVICES':>9}{'ENDPOINTS':>11}{'RULES':>9}  LAST UPDATED"
    for family in agent.families:
        updated = f"{duration(agent.now - family.last_updated)} ago" if family.last_updated else "never"
        state = family_state(agent, family)
        shade = "green" if state == "up to date" else "red"
        yield (
            f"{family.family:<8}{styled(f'{state:<18}', shade)}{family.services:>9}"
            f"{family.endpoints:>11}{sum(family.rules.values()):>9}  {updated}"
        )
    for text in rejected_trees(agent):
        yield from _wrapped(text, "red")
    yield from _quarantined(agent)
    yield from _repairs(agent)
    for name, reason in agent.unavailable_families.items():
        yield from _wrapped(f"{name} is unavailable: {reason}")
    yield ""
    yield from _syncs(agent)
    yield from _wrapped(pending(agent) or "No changes are pending.")


def _quarantined(agent: Status) -> Iterator[str]:
    quarantined = [it for family in agent.families for it in family.quarantined]
    if not quarantined:
        return
    yield ""
    yield from _wrapped(f"Quarantined: {len(quarantined)}. {QUARANTINED}", "red")
    for it in quarantined[:_QUARANTINED]:
        since = f"{duration(max(0.0, agent.now - it.since))} ago"
        yield f"  {styled(str(it.port_name), bold=True)}  {it.protocol} {it.family}, {since}"
        yield from _wrapped(quarantine_reason(it), indent=" " * 4)
    if len(quarantined) > _QUARANTINED:
        yield f"  and {len(quarantined) - _QUARANTINED} more (-o json has them all)"


def _repairs(agent: Status) -> Iterator[str]:
    if not agent.repairs:
        return
    yield ""
    yield from _wrapped("Drift repaired:")
    for repair in reversed(agent.repairs[-_REPAIRS:]):
        ago = f"{duration(max(0.0, agent.now - repair.time))} ago"
        yield f"  {ago:<16}{repair.family:<6}in {duration(repair.seconds)}"
        by = f" (by {', '.join(repair.writers)})" if repair.writers else ""
        yield from _wrapped(f"{repair.what}{by}", indent=" " * 4)


def _syncs(agent: Status) -> Iterator[str]:
    if not agent.syncs:
        yield "No sync yet."
        return
    middle, worst = typical(agent.syncs)
    yield f"Last {len(agent.syncs)} syncs: median {duration(middle)}, longest {duration(worst)}"
    for sync in reversed(agent.syncs[-_SYNCS:]):
        ago = f"{duration(max(0.0, agent.now - sync.time))} ago"
        yield (
            f"  {ago:<16}{sync.family:<6}{kind_of(sync):<17}{duration(sync.seconds):>9}  {sync.rules} rules"
        )
        if sync.failure:
            yield from _wrapped(sync.failure, "red", " " * 4)


def _wrapped(text: str, color: str = "", indent: str = "") -> Iterator[str]:
    return (styled(line, color) for line in wrapped(text, indent))
