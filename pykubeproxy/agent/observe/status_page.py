"""The status as an HTML page: one document without scripts or external resources, readable on a phone."""

import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import sqrt

from pykubeproxy.agent.observe import status_text
from pykubeproxy.agent.observe.status import PortStatus, Repair, Status, Sync
from pykubeproxy.agent.observe.status_text import duration
from pykubeproxy.objects import address_and_port
from pykubeproxy.wording import escape, percent

# How many endpoints of a service port, syncs, and quarantined service ports are listed.
_ENDPOINTS, _SYNCS, _QUARANTINED = 50, 10, 100
# The chart, in its own units; the smallest bar is still visible.
_BAR, _GAP, _HEIGHT, _LEAST = 8, 2, 60, 1.5
_STYLE = """
:root { color-scheme: light dark; --text: #22262b; --soft: #626a73; --line: #dcdfe3; --ground: #fdfdfc;
  --bar: #7d9cb8; --full: #3e6a91; --good: #2c7a4b; --bad: #b3372f; }
@media (prefers-color-scheme: dark) { :root { --text: #d9dde1; --soft: #98a1aa; --line: #353b41;
  --ground: #17191c; --bar: #56748f; --full: #8fb6d9; --good: #6cc08b; --bad: #ef8078; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 52rem; color: var(--text);
  background: var(--ground); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.35rem; font-weight: 600; margin: 0; }
h2 { font-size: 1.05rem; font-weight: 600; margin: 2.25rem 0 .5rem; }
p { margin: .25rem 0; }
.soft, small, th { color: var(--soft); }
.good { color: var(--good); } .bad { color: var(--bad); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { font-weight: 400; text-align: left; white-space: nowrap; }
th, td { padding: .2rem .75rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.number { text-align: right; white-space: nowrap; }
.wide { overflow-x: auto; }
time { white-space: nowrap; }
svg { display: block; width: 100%; height: 5rem; border-bottom: 1px solid var(--line); }
.bar { fill: var(--bar); } .full { fill: var(--full); } .failed { fill: var(--bad); }
form { display: flex; flex-wrap: wrap; gap: .5rem; margin: .5rem 0 1rem; }
input, button { font: inherit; color: inherit; background: transparent; border: 1px solid var(--line);
  border-radius: .3rem; padding: .35rem .6rem; min-width: 0; }
input { flex: 1 1 12rem; }
details { border-bottom: 1px solid var(--line); padding: .4rem 0; }
summary { cursor: pointer; }
summary b { font-weight: 600; }
details table { margin: .5rem 0 .75rem; }
@media (max-width: 36rem) {
  .stacked, .stacked tbody { display: block; }
  .stacked tr { display: flex; flex-wrap: wrap; column-gap: .75rem; padding: .3rem 0;
    border-bottom: 1px solid var(--line); }
  .stacked tr:first-child { display: none; }
  .stacked td { border: 0; padding: 0; min-width: 0; }
  .stacked .long { flex-basis: 100%; }
  .stacked [data-of]::after { content: " " attr(data-of); }
  .stacked [data-done]::before { content: attr(data-done) " "; }
}
"""


def status_page(status: Status) -> str:
    """Return the whole document."""
    title = f"pykubeproxy on {escape(status.node)}"
    parts = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style>\n</head>\n<body>",
        *_head(status, title),
        *_families(status),
        *_quarantined(status),
        *_repairs(status.repairs, status.now),
        *_last_syncs(status.syncs, status.now),
        *_services(status),
        "</body>\n</html>\n",
    )
    return "\n".join(parts)


def _head(status: Status, title: str) -> Iterator[str]:
    yield f"<h1>{title}</h1>"
    kind = "good" if status_text.all_well(status) else "bad"
    yield f'<p><span class="{kind}">{escape(status_text.health(status))}</span></p>'
    up = duration(max(0.0, status.now - status.started))
    yield (
        f'<p class="soft">Version {escape(status.version)}, iptables backend {escape(status.backend)}.'
        f" Up {up}, since {_moment(status.started)}.</p>"
    )
    if text := status_text.unwatched(status):
        yield f'<p class="bad">{escape(text)}</p>'
    if text := status_text.waiting(status):
        yield f"<p>{escape(text)}</p>"
    if text := status_text.pending(status):
        yield f"<p>{escape(text)}</p>"


def _families(status: Status) -> Iterator[str]:
    yield "<h2>Families</h2>"
    yield '<table class="stacked"><tr><th>Family<th>State<th class="number">Services'
    yield '<th class="number">Endpoints<th class="number">Rules<th>Last updated</tr>'
    for family in status.families:
        state = status_text.family_state(status, family)
        kind = "good" if state == "up to date" else "bad"
        updated = _ago(status.now, family.last_updated) if family.last_updated else "never"
        yield (
            f'<tr><td>{escape(family.family)}<td class="{kind}">{state}'
            f'<td class="number" data-of="services">{family.services}'
            f'<td class="number" data-of="endpoints">{family.endpoints}'
            f'<td class="number" data-of="rules">{sum(family.rules.values())}'
            f'<td data-done="updated">{updated}</tr>'
        )
    yield "</table>"
    for text in status_text.rejected_trees(status):
        yield f'<p class="bad">{escape(text)}</p>'
    for name, reason in status.unavailable_families.items():
        yield f'<p class="soft">{escape(name)} is not available: {escape(reason)}</p>'


def _quarantined(status: Status) -> Iterator[str]:
    quarantined = [port for family in status.families for port in family.quarantined]
    if not quarantined:
        return
    yield f"<h2>Quarantined</h2>\n<p>{status_text.QUARANTINED}</p>"
    yield '<table class="stacked"><tr><th>Service<th>Family<th>Since<th>Reason</tr>'
    for port in quarantined[:_QUARANTINED]:
        yield (
            f"<tr><td>{escape(str(port.port_name))} <small>{escape(port.protocol)}</small><td>{escape(port.family)}"
            f'<td>{_ago(status.now, port.since)}<td class="long">{escape(status_text.quarantine_reason(port))}</tr>'
        )
    yield "</table>"
    yield from _more(len(quarantined) - _QUARANTINED)


def _repairs(repairs: Sequence[Repair], now: float) -> Iterator[str]:
    if not repairs:
        return
    yield "<h2>Drift repairs</h2>\n<p>Other programs changed rules; the agent repaired them.</p>"
    yield '<table class="stacked"><tr><th>When<th>Family<th class="number">Duration<th>Drift<th>Writers</tr>'
    for repair in reversed(repairs):
        yield (
            f'<tr><td>{_ago(now, repair.time)}<td>{escape(repair.family)}<td class="number">'
            f'{duration(repair.seconds)}<td class="long">{escape(repair.what)}'
            f'<td class="long">{escape(", ".join(repair.writers))}</tr>'
        )
    yield "</table>"


def _last_syncs(syncs: Sequence[Sync], now: float) -> Iterator[str]:
    yield "<h2>Last syncs</h2>"
    if not syncs:
        yield '<p class="soft">No sync yet.</p>'
        return
    middle, worst = status_text.typical(syncs)
    number = f"Last {len(syncs)} syncs" if len(syncs) > 1 else "One sync"
    yield f"<p>{number}: median {duration(middle)}, longest {duration(worst)}.</p>"
    yield from _chart(syncs, worst)
    yield "<p><small>One bar per sync, newest on the right; the height is the square root of the duration."
    yield "Strong colour: full sync. Red: failed.</small></p>"
    yield '<table class="stacked"><tr><th>Ended<th>Family<th>Kind<th class="number">Duration'
    yield '<th class="number">Rules written</tr>'
    for sync in reversed(syncs[-_SYNCS:]):
        rules = (
            f'<td class="long bad">{escape(sync.failure)}'
            if sync.failure
            else f'<td class="number" data-of="rules">{sync.rules}'
        )
        yield (
            f"<tr><td>{_ago(now, sync.time)}<td>{escape(sync.family)}<td>{status_text.kind_of(sync)}"
            f'<td class="number">{duration(sync.seconds)}{rules}</tr>'
        )
    yield "</table>"


def _chart(syncs: Sequence[Sync], worst: float) -> Iterator[str]:
    width = len(syncs) * (_BAR + _GAP)
    # With few syncs, bars keep their width.
    box = max(width, 30 * (_BAR + _GAP))
    yield (
        f'<svg viewBox="0 0 {box} {_HEIGHT}" preserveAspectRatio="none" role="img"'
        f' aria-label="Duration of the last {len(syncs)} syncs, up to {duration(worst)}">'
    )
    for position, sync in enumerate(syncs):
        # The square root keeps partial syncs visible beside full ones, which take 100 times as long.
        height = max(_LEAST, _HEIGHT * sqrt(sync.seconds / worst)) if worst else _LEAST
        kind = "failed" if sync.failure else "full" if sync.full else "bar"
        left = box - width + position * (_BAR + _GAP)
        yield (
            f'<rect class="{kind}" x="{left}" y="{_HEIGHT - height:.1f}" width="{_BAR}" height="{height:.1f}">'
            f"<title>{_moment(sync.time)}, {escape(sync.family)}, {status_text.kind_of(sync)}: {duration(sync.seconds)}"
            "</title></rect>"
        )
    yield "</svg>"


def _services(status: Status) -> Iterator[str]:
    yield '<h2>Services</h2>\n<form method="get">'
    for name, value in (("namespace", status.filter.namespace), ("service", status.filter.service)):
        yield (
            f'<input name="{name}" value="{escape(value)}" placeholder="{name}" aria-label="{name}"'
            ' autocapitalize="none" autocomplete="off">'
        )
    yield "<button>Show</button></form>"
    if status.busy:
        yield "<p>A sync is running; reload the page to see services.</p>"
        return
    names = {(port.namespace, port.name) for port in status.services}
    if not names:
        yield f'<p class="soft">{"No service selected." if status.matching else "No services."}</p>'
    elif len(names) < status.matching:
        yield f"<p>Showing {len(names)} of {status.matching}; enter a name to see another one.</p>"
    by_port = groupby(status.services, key=lambda port: (port.title, port.protocol, port.family))
    for (title, protocol, family), policies in by_port:
        yield f"<details{' open' if len(names) == 1 else ''}><summary><b>{escape(title)}</b>"
        ports = [*policies]
        numbers = ", ".join(_summary(port, with_policy=len(ports) > 1) for port in ports)
        yield f'<span class="soft">{escape(protocol)} {escape(family)}</span> {numbers}</summary>'
        for port in ports:
            yield from _policy(port)
        yield "</details>"


def _summary(port: PortStatus, with_policy: bool) -> str:
    used = sum(endpoint.used for endpoint in port.endpoints)
    style = "" if used else ' class="bad"'
    under = f" under {escape(port.policy)}" if with_policy else ""
    return f"<span{style}>{used} of {len(port.endpoints)} endpoints{under}</span>"


def _policy(port: PortStatus) -> Iterator[str]:
    frontends = ", ".join(map(str, port.frontends))
    yield f"<p>{escape(frontends)} <small>policy {escape(port.policy)}</small></p>"
    if port.endpoints:
        yield '<div class="wide"><table><tr><th>Endpoint<th class="number">Share<th>State</tr>'
        for endpoint in port.endpoints[:_ENDPOINTS]:
            at = escape(address_and_port(endpoint.address, endpoint.port))
            yield f'<tr><td>{at}<td class="number">{percent(endpoint.share)}<td>{escape(endpoint.state)}</tr>'
        yield "</table></div>"
        yield from _more(len(port.endpoints) - _ENDPOINTS)


def _more(number: int) -> Iterator[str]:
    if number > 0:
        yield f"<p><small>and {number} more; the JSON form lists all</small></p>"


def _ago(now: float, then: float) -> str:
    """Return how long ago, with the exact time as a tooltip."""
    return f'<time title="{_moment(then)}">{duration(max(0.0, now - then))} ago</time>'


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
