"""The pages of the metrics address, as kube-proxy has them."""

import json
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import parse_qsl

import pykubeproxy
from pykubeproxy.agent import http
from pykubeproxy.agent.observe import object_documents as told
from pykubeproxy.agent.observe.object_documents import Objects
from pykubeproxy.agent.observe.status import Filter, Status, encode
from pykubeproxy.agent.observe.status_page import status_page
from pykubeproxy.config import Config, configz, dump, flagz

# The kube-proxy whose flags, metrics and pages these are.
_EMULATED = "1.36"
# The very words of upstream: monitoring looks for them.
_STATUSZ_HEAD = (
    "\nkube-proxy statusz\nWarning: This endpoint is not meant to be machine parseable, has no formatting"
    " compatibility guarantees and is for debugging purposes only.\n"
)
# Nothing of the page comes from elsewhere, and what it says is true for a moment only.
_FOR_BROWSERS = (
    ("Cache-Control", "no-store"),
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'",
    ),
    ("Vary", "Accept"),
)
_WEIGHT = re.compile(r"[01](\.\d{0,3})?")
_HIGHEST_LIMIT = 1000
# User and password in the URL of --master.
_PASSWORD = re.compile(r"^(master: [^/]*//)[^/]*@", re.MULTILINE)


def metrics_pages(
    metrics: Callable[[], http.Answer],
    config: Callable[[], Config],
    flags: Mapping[str, object],
    status: Callable[[Filter], Status] | None = None,
    objects: Callable[[Filter], Objects | None] | None = None,
    clock: Callable[[], float] = time.time,
) -> http.Page:
    """/metrics and the pages that tell of configuration and version; none of them holds a secret.

    `config` gives the one in force, `flags` are those of the command line as `config.load` takes them. With `status`
    /statusz is a page of HTML or JSON for those who ask for that, and kube-proxy's text for all others;
    with `objects` /servicez tells what the services are made from.
    """
    started = clock()
    table: dict[str, Callable[[], http.Answer]] = {
        "/configz": lambda: http.Answer(_compact(configz(config())), http.JSON),
        "/flagz": lambda: http.text(_PASSWORD.sub(r"\1", flagz(flags))),
        "/healthz": lambda: http.text("ok"),
        "/metrics": metrics,
        "/proxyMode": lambda: http.text("iptables"),
    }
    paths = sorted(table)
    table["/statusz"] = lambda: http.text(statusz(started, clock(), paths))
    plain = http.pages(table)

    def page(request: http.Request) -> http.Answer:
        if request.path == "/statusz" and status:
            return _status(request, status) or plain(request)
        if request.path == "/servicez" and objects:
            return _objects(request, objects, config)
        return plain(request)

    return page


def _status(request: http.Request, status: Callable[[Filter], Status]) -> http.Answer | None:
    """The status in the form that is asked for; None where that is text."""
    content_type = preferred(request.accept, (http.TEXT, http.HTML, http.JSON))
    if content_type == http.TEXT:
        return None
    try:
        wanted = read_filter(request.query)
    except ValueError as error:
        return http.Answer(f"400 bad request: {error}\n".encode(), status=400)
    now = status(wanted)
    body = encode(now) if content_type == http.JSON else status_page(now).encode()
    return http.Answer(body, content_type, headers=_FOR_BROWSERS)


def _objects(
    request: http.Request, objects: Callable[[Filter], Objects | None], config: Callable[[], Config]
) -> http.Answer:
    """The objects that are asked for, and the configuration."""
    try:
        found = objects(read_filter(request.query))
    except ValueError as error:
        return http.Answer(f"400 bad request: {error}\n".encode(), status=400)
    if found is None:
        return http.Answer(b"503 a sync is running; ask again\n", status=503)
    body = told.encode(told.ObjectDocument(found, dump(config())))
    return http.Answer(body, http.JSON, headers=_FOR_BROWSERS)


def preferred(accept: str, offered: Sequence[str]) -> str:
    """The content type offered that a header Accept puts first; of equals, and without a header, the first."""
    quality: dict[str, float] = {}
    for entry in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in entry.split(";"))
        weight = next((it[2:] for it in parameters if it.startswith("q=")), "1")
        quality[kind] = float(weight) if _WEIGHT.fullmatch(weight) else 0.0

    def wanted(content_type: str) -> float:
        kind = content_type.partition(";")[0]
        ranges = (kind, f"{kind.partition('/')[0]}/*", "*/*")
        return next((quality[it] for it in ranges if it in quality), 0.0)

    return max(offered, key=wanted)


def read_filter(query: str) -> Filter:
    """Read "namespace=NAME", "service=NAME" or "service=NAMESPACE/NAME", and "limit=NUMBER". Raises ValueError."""
    asked = dict(parse_qsl(query, max_num_fields=8))
    namespace, _, service = asked.get("service", "").strip().rpartition("/")
    limit = asked.get("limit", str(Filter().limit))
    if not (limit.isascii() and limit.isdecimal() and int(limit) <= _HIGHEST_LIMIT):
        raise ValueError(f"limit is a number up to {_HIGHEST_LIMIT}")
    return Filter(namespace or asked.get("namespace", "").strip(), service, int(limit))


def statusz(started: float, now: float, paths: list[str]) -> str:
    """The text of /statusz; times are seconds since 1970."""
    minutes, seconds = divmod(max(0, int(now - started)), 60)
    hours, minutes = divmod(minutes, 60)
    start = time.gmtime(started)
    lines = {
        "Started": f"{time.strftime('%a %b', start)} {start.tm_mday:2} {time.strftime('%H:%M:%S UTC %Y', start)}",
        "Up": f"{hours} hr {minutes:02} min {seconds:02} sec",
        "Python version": platform.python_version(),
        "Binary version": pykubeproxy.__version__,
        "Emulation version": _EMULATED,
        "Paths": " ".join(paths),
    }
    return "\n".join([_STATUSZ_HEAD, *(f"{name}  {value}" for name, value in lines.items()), ""])


def _compact(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
