"""Answer requests to the metrics address."""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from urllib.parse import parse_qsl, urlsplit

import msgspec

import pykubeproxy
from pykubeproxy import http
from pykubeproxy.agent.observe.metrics import Slis, scraped
from pykubeproxy.agent.observe.status_html import status_page
from pykubeproxy.config import EMULATED, Config, configz, dump, flag_values, flagz
from pykubeproxy.pages import servicez
from pykubeproxy.pages.servicez import NodeObjects, ObjectDocument
from pykubeproxy.pages.statusz import AgentStatus, PageFilter, encode
from pykubeproxy.wording import without_password

# The page loads nothing from elsewhere and must not be cached.
_BROWSER_HEADERS = (
    ("Cache-Control", "no-store"),
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'",
    ),
    ("Vary", "Accept"),
)
_HIGHEST_LIMIT = 1000
# How long a client may read /servicez, in seconds: meanwhile, memory holds objects that may have changed since.
_STREAM_SECONDS = 30.0
# The exact text of kube-proxy, which monitoring may match.
_STATUSZ_HEAD = (
    "\nkube-proxy statusz\nWarning: This endpoint is not meant to be machine parseable, has no formatting"
    " compatibility guarantees and is for debugging purposes only.\n"
)


def metrics_pages(
    metrics: Callable[[], http.Response],
    config: Config,
    flags: Mapping[str, object],
    status: Callable[[PageFilter], AgentStatus] | None = None,
    objects: Callable[[PageFilter, bool], NodeObjects | None] | None = None,
) -> http.Handler:
    """Return /metrics and the pages about configuration, version and status; none of them contains a secret.

    `flags` are those of the command line. Pages about Services are for clients on this node only, see `is_local`: with
    `status`, /statusz is HTML or JSON for those that ask for it, and / leads browsers there; with `objects`, /servicez is
    served, and with "slices=all" it has the EndpointSlices of all Services. All others get what kube-proxy answers.
    """
    started = time.time()
    slis = Slis(started)
    values = flag_values(flags, config)
    shown = values | {"master": without_password(values["master"])}
    table: dict[str, http.Handler] = {
        "/configz": lambda _: http.Response(msgspec.json.encode(configz(config)), http.JSON),
        "/healthz": slis.healthz,
        "/metrics": lambda request: scraped(metrics(), request, started),
        "/proxyMode": lambda _: http.text("iptables"),
    }
    if config.feature_gates.serves_page("ComponentFlagz"):
        table["/flagz"] = lambda _: http.text(flagz(shown))
    paths = sorted(table)
    table |= {
        "/healthz/ping": lambda _: http.text("ok"),
        "/metrics/slis": lambda request: scraped(slis.metrics(request), request, started),
    }
    if config.feature_gates.serves_page("ComponentStatusz"):
        table["/statusz"] = lambda request: _statusz_text(request, statusz(started, time.time(), paths))
    plain = http.router(table)

    def page(request: http.Request) -> http.Response:
        if not is_local(request):
            return plain(request)
        if request.path == "/servicez" and objects:
            all_slices = "slices=all" in request.query.split("&")
            return _filtered(request, lambda filter_: _objects(objects(filter_, all_slices), config))
        if request.path in ("/", "/statusz") and status:
            accept = request.headers.get("accept", "")
            as_json, as_html = http.accepts(accept, "application/json"), http.accepts(accept, "text/html")
            if request.path == "/" and as_html:
                return http.Response(status=302, headers=(("Location", "/statusz"), *_BROWSER_HEADERS))
            if request.path == "/statusz" and (as_json or as_html):
                refresh = "refresh=on" in request.query.split("&")
                return _filtered(request, lambda filter_: _status(status(filter_), as_json, refresh))
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


def _statusz_text(request: http.Request, text: str) -> http.Response:
    """Return the text; refuse a client that asks for JSON, such as `status` from elsewhere."""
    if http.accepts(request.headers.get("accept", ""), "application/json"):
        return http.Response(b"406 not acceptable: JSON is for clients over loopback\n", status=406)
    return http.text(text)


def _filtered(request: http.Request, make: Callable[[PageFilter], http.Response]) -> http.Response:
    try:
        filter_ = read_filter(request.query)
    except ValueError as error:
        return http.Response(f"400 bad request: {error}\n".encode(), status=400)
    return make(filter_)


def _status(status: AgentStatus, as_json: bool, refresh: bool) -> http.Response:
    if as_json:
        return http.Response(encode(status), http.JSON, headers=_BROWSER_HEADERS)
    return http.Response(status_page(status, refresh).encode(), http.HTML, headers=_BROWSER_HEADERS)


def _objects(objects: NodeObjects | None, config: Config) -> http.Response:
    if objects is None:
        return http.Response(b"503 a sync is running; retry\n", status=503)
    document = ObjectDocument(objects, dump(config))

    def stream(send: http.Send, _: int) -> None:
        deadline = time.monotonic() + _STREAM_SECONDS
        for piece in servicez.pieces(document):
            if time.monotonic() > deadline:
                raise TimeoutError
            send(piece)

    return http.Response(content_type=http.JSON, headers=_BROWSER_HEADERS, stream=stream)


def read_filter(query: str) -> PageFilter:
    """Read "namespace=NAME", "service=NAME" or "service=NAMESPACE/NAME", and "limit=NUMBER". Raises ValueError."""
    values = dict(parse_qsl(query, max_num_fields=8))
    namespace, _, service = values.get("service", "").strip().rpartition("/")
    limit = values.get("limit", str(PageFilter().limit))
    if not (limit.isascii() and limit.isdecimal() and int(limit) <= _HIGHEST_LIMIT):
        raise ValueError(f"limit must be a number up to {_HIGHEST_LIMIT}")
    return PageFilter(namespace or values.get("namespace", "").strip(), service, int(limit))


def statusz(started: float, now: float, paths: Sequence[str]) -> str:
    """Return the text of /statusz, which lists these paths. Times are in seconds since 1970."""
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
