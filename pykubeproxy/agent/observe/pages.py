"""The pages of the metrics address, as in kube-proxy, and those for clients on this node."""

import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from urllib.parse import parse_qsl, urlsplit

import msgspec

import pykubeproxy
from pykubeproxy import http
from pykubeproxy.agent.observe import object_documents
from pykubeproxy.agent.observe.object_documents import ObjectDocument, Objects
from pykubeproxy.agent.observe.status import Filter, Status, encode
from pykubeproxy.agent.observe.status_page import status_page
from pykubeproxy.config import EMULATED, Config, configz, dump, flagz

# The exact text of kube-proxy, which monitoring may match.
_STATUSZ_HEAD = (
    "\nkube-proxy statusz\nWarning: This endpoint is not meant to be machine parseable, has no formatting"
    " compatibility guarantees and is for debugging purposes only.\n"
)
# The page loads nothing from elsewhere and must not be cached.
_BROWSER_HEADERS = (
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
    metrics: Callable[[], http.Response],
    config: Config,
    flags: Mapping[str, object],
    status: Callable[[Filter], Status] | None = None,
    objects: Callable[[Filter], Objects | None] | None = None,
    clock: Callable[[], float] = time.time,
) -> http.Handler:
    """Return /metrics and the pages about configuration, version and status; none of them contains a secret.

    `flags` are those of the command line. Pages about Services are for clients on this node only, see `is_local`. With
    `status`, /statusz is HTML or JSON for those that accept it, and kube-proxy's text for all others. With `objects`,
    /servicez is served.
    """
    started = clock()
    table: dict[str, Callable[[], http.Response]] = {
        "/configz": lambda: http.Response(msgspec.json.encode(configz(config)), http.JSON),
        "/flagz": lambda: http.text(_PASSWORD.sub(r"\1", flagz(flags))),
        "/healthz": lambda: http.text("ok"),
        "/metrics": metrics,
        "/proxyMode": lambda: http.text("iptables"),
    }
    paths = sorted(table)
    table["/statusz"] = lambda: http.text(statusz(started, clock(), paths))
    plain = http.router(table)

    def page(request: http.Request) -> http.Response:
        if not is_local(request):
            return plain(request)
        if request.path == "/servicez" and objects:
            return _filtered(request, lambda filter_: _objects(objects(filter_), config))
        if request.path == "/statusz" and status:
            content_type = preferred(request.headers.get("accept", ""), (http.TEXT, http.HTML, http.JSON))
            if content_type != http.TEXT:
                return _filtered(request, lambda filter_: _status(status(filter_), content_type))
        return plain(request)

    return page


def is_local(request: http.Request) -> bool:
    """Return whether a request comes from this node, over loopback and to a loopback name.

    An address of the node proves nothing: masqueraded connections of pods have it too. The name keeps out pages in a
    browser that resolve their own name to 127.0.0.1, and a proxy on this node that forwards requests of others.
    """
    return (
        request.peer is not None
        and request.peer.is_loopback
        and _names_loopback(request.headers.get("host", ""))
    )


def _names_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _filtered(request: http.Request, make: Callable[[Filter], http.Response]) -> http.Response:
    try:
        filter_ = read_filter(request.query)
    except ValueError as error:
        return http.Response(f"400 bad request: {error}\n".encode(), status=400)
    return make(filter_)


def _status(status: Status, content_type: str) -> http.Response:
    body = encode(status) if content_type == http.JSON else status_page(status).encode()
    return http.Response(body, content_type, headers=_BROWSER_HEADERS)


def _objects(objects: Objects | None, config: Config) -> http.Response:
    if objects is None:
        return http.Response(b"503 a sync is running; retry\n", status=503)
    body = object_documents.encode(ObjectDocument(objects, dump(config)))
    return http.Response(body, http.JSON, headers=_BROWSER_HEADERS)


def preferred(accept: str, offered: Sequence[str]) -> str:
    """Return the offered content type that the header Accept prefers; of equals, and without a header, the first."""
    quality: dict[str, float] = {}
    for entry in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in entry.split(";"))
        weight = next((parameter[2:] for parameter in parameters if parameter.startswith("q=")), "1")
        quality[kind] = float(weight) if _WEIGHT.fullmatch(weight) else 0.0

    def rank(content_type: str) -> float:
        kind = content_type.partition(";")[0]
        ranges = (kind, f"{kind.partition('/')[0]}/*", "*/*")
        return next((quality[accepted] for accepted in ranges if accepted in quality), 0.0)

    return max(offered, key=rank)


def read_filter(query: str) -> Filter:
    """Read "namespace=NAME", "service=NAME" or "service=NAMESPACE/NAME", and "limit=NUMBER". Raises ValueError."""
    values = dict(parse_qsl(query, max_num_fields=8))
    namespace, _, service = values.get("service", "").strip().rpartition("/")
    limit = values.get("limit", str(Filter().limit))
    if not (limit.isascii() and limit.isdecimal() and int(limit) <= _HIGHEST_LIMIT):
        raise ValueError(f"limit must be a number up to {_HIGHEST_LIMIT}")
    return Filter(namespace or values.get("namespace", "").strip(), service, int(limit))


def statusz(started: float, now: float, paths: list[str]) -> str:
    """Return kube-proxy's text of /statusz; times are seconds since 1970."""
    minutes, seconds = divmod(max(0, int(now - started)), 60)
    hours, minutes = divmod(minutes, 60)
    start = time.gmtime(started)
    lines = {
        "Started": f"{time.strftime('%a %b', start)} {start.tm_mday:2} {time.strftime('%H:%M:%S UTC %Y', start)}",
        "Up": f"{hours} hr {minutes:02} min {seconds:02} sec",
        "Python version": platform.python_version(),
        "Binary version": pykubeproxy.__version__,
        "Emulation version": EMULATED,
        "Paths": " ".join(paths),
    }
    return "\n".join([_STATUSZ_HEAD, *(f"{name}  {value}" for name, value in lines.items()), ""])
