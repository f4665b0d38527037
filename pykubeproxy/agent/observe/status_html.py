"""The status as an HTML page: one document without scripts or external resources, readable on a phone."""

from collections.abc import Iterator
from itertools import groupby

from pykubeproxy.objects import address_and_port
from pykubeproxy.pages import status_text
from pykubeproxy.pages.statusz import AgentStatus, PortStatus
from pykubeproxy.report.html import STYLE, html
from pykubeproxy.report.text import Row, Table
from pykubeproxy.wording import duration, escape, percent

# How many endpoints of a service port, syncs, and quarantined service ports are listed.
_ENDPOINTS, _SYNCS, _QUARANTINED = 50, 10, 100
# How often the page loads itself again, on demand, in seconds.
_REFRESH = 5
_RULES = (
    "Rules are those of pykubeproxy in the tables of the kernel. A full sync compares all of them with the Services; a"
    " partial one writes the rules of changed Services. Rules written are those that a sync added or replaced."
)
_STYLE = """
:root { color-scheme: light dark; --text: #22262b; --soft: #626a73; --line: #dcdfe3; --ground: #fdfdfc;
  --good: #2c7a4b; --warning: #8a6100; --bad: #b3372f; }
@media (prefers-color-scheme: dark) { :root { --text: #d9dde1; --soft: #98a1aa; --line: #353b41;
  --ground: #17191c; --good: #6cc08b; --warning: #d8b35c; --bad: #ef8078; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 52rem; color: var(--text);
  background: var(--ground); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.35rem; font-weight: 600; margin: 0; }
time { white-space: nowrap; }
form { display: flex; flex-wrap: wrap; align-items: center; gap: .5rem; margin: .5rem 0 1rem; }
input, button { font: inherit; color: inherit; background: transparent; border: 1px solid var(--line);
  border-radius: .3rem; padding: .35rem .6rem; min-width: 0; }
input[name] { flex: 1 1 12rem; }
input[type=checkbox] { flex: none; vertical-align: -.1em; }
details { border-bottom: 1px solid var(--line); padding: .4rem 0; }
summary { cursor: pointer; }
summary b { font-weight: 600; }
details table { margin: .5rem 0 .75rem; }
"""


def status_page(status: AgentStatus, refresh: bool = False) -> str:
    """Return the whole document. With `refresh`, the browser loads it again and again."""
    title = f"pykubeproxy on {escape(status.node)}"
    up = f"Up {duration(max(0.0, status.now - status.started))}, since {status_text.moment(status.started)}."
    about = f"Version {status.version}, iptables backend {status.backend}. {up}"
    parts = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="refresh" content="{_REFRESH}">' if refresh else "",
        f"<style>{_STYLE}{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>",
        f'<p class="aside">{escape(about)}</p>',
        *html(status_text.blocks(status, _SYNCS, _QUARANTINED, len(status.repairs))),
        f"<p><small>{_RULES}</small></p>",
        *_services(status, refresh),
        "</body>\n</html>\n",
    )
    return "\n".join(parts)


def _services(status: AgentStatus, refresh: bool) -> Iterator[str]:
    yield '<h2>Services</h2>\n<form method="get">'
    for name, value in (("namespace", status.filter.namespace), ("service", status.filter.service)):
        yield (
            f'<input name="{name}" value="{escape(value)}" placeholder="{name}" aria-label="{name}"'
            ' autocapitalize="none" autocomplete="off">'
        )
    checked = " checked" if refresh else ""
    yield f'<label><input type="checkbox" name="refresh"{checked}> reload every {_REFRESH} s</label>'
    yield "<button>Show</button></form>"
    if status.busy:
        yield "<p>A sync is running; reload the page to see services.</p>"
        return
    names = {(port.namespace, port.name) for port in status.services}
    if not names:
        yield f'<p class="aside">{"No service selected." if status.matching else "No services."}</p>'
    elif len(names) < status.matching:
        yield f"<p>Showing {len(names)} of {status.matching}; enter a name to see another one.</p>"
    by_port = groupby(status.services, key=lambda port: (port.title, port.protocol, port.family))
    for (title, protocol, family), policies in by_port:
        yield f"<details{' open' if len(names) == 1 else ''}><summary><b>{escape(title)}</b>"
        ports = [*policies]
        numbers = ", ".join(_summary(port, with_policy=len(ports) > 1) for port in ports)
        yield f'<span class="aside">{escape(protocol)} {escape(family)}</span> {numbers}</summary>'
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
    rows = [
        Row((address_and_port(endpoint.address, endpoint.port), percent(endpoint.share), endpoint.state))
        for endpoint in port.endpoints[:_ENDPOINTS]
    ]
    if rows:
        table = Table(rows, ("ENDPOINT", "SHARE", "STATE"), frozenset([1]))
        yield from html([table, *status_text.more(len(port.endpoints) - _ENDPOINTS)])
