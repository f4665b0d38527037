"""The pages of the metrics address, as in kube-proxy, and those for clients on this node."""

import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from urllib.parse import parse_qsl, urlsplit

import msgspec

from pykubeproxy import http
from pykubeproxy.agent.observe import object_documents
from pykubeproxy.agent.observe.exposition import scraped
from pykubeproxy.agent.observe.object_documents import ObjectDocument, Objects
from pykubeproxy.agent.observe.slis import Slis
from pykubeproxy.agent.observe.status import Filter, Status, encode
from pykubeproxy.agent.observe.status_page import status_page
from pykubeproxy.agent.observe.zpages import Uptime, flagz_page, statusz_page
from pykubeproxy.config import Config, configz, dump, flag_values
from pykubeproxy.http.accept import preferred
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


def metrics_pages(
    metrics: Callable[[], http.Response],
    config: Config,
    flags: Mapping[str, object],
    status: Callable[[Filter], Status] | None = None,
    objects: Callable[[Filter, bool], Objects | None] | None = None,
    clock: Callable[[], float] = time.time,
) -> http.Handler:
    """Return /metrics and the pages about configuration, version and status; none of them contains a secret.

    `flags` are those of the command line. Pages about Services are for clients on this node only, see `is_local`: with
    `status`, /statusz is HTML or JSON for those that accept it; with `objects`, /servicez is served, and with "slices=all"
    it has the EndpointSlices of all Services. All others get what kube-proxy answers.
    """
    started = clock()
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
        table["/flagz"] = lambda request: flagz_page(request, shown)
    paths = sorted(table)
    table |= {
        "/healthz/ping": lambda _: http.text("ok"),
        "/metrics/slis": lambda request: scraped(slis.metrics(request), request, started),
    }
    if config.feature_gates.serves_page("ComponentStatusz"):
        table["/statusz"] = lambda request: statusz_page(request, Uptime(started, clock()), paths)
    plain = http.router(table)

    def page(request: http.Request) -> http.Response:
        if not is_local(request):
            return plain(request)
        if request.path == "/servicez" and objects:
            all_slices = "slices=all" in request.query.split("&")
            return _filtered(request, lambda filter_: _objects(objects(filter_, all_slices), config))
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
    document = ObjectDocument(objects, dump(config))

    def stream(send: http.Send, _: int) -> None:
        deadline = time.monotonic() + _STREAM_SECONDS
        for piece in object_documents.pieces(document):
            if time.monotonic() > deadline:
                raise TimeoutError
            send(piece)

    return http.Response(content_type=http.JSON, headers=_BROWSER_HEADERS, stream=stream)


def read_filter(query: str) -> Filter:
    """Read "namespace=NAME", "service=NAME" or "service=NAMESPACE/NAME", and "limit=NUMBER". Raises ValueError."""
    values = dict(parse_qsl(query, max_num_fields=8))
    namespace, _, service = values.get("service", "").strip().rpartition("/")
    limit = values.get("limit", str(Filter().limit))
    if not (limit.isascii() and limit.isdecimal() and int(limit) <= _HIGHEST_LIMIT):
        raise ValueError(f"limit must be a number up to {_HIGHEST_LIMIT}")
    return Filter(namespace or values.get("namespace", "").strip(), service, int(limit))
