"""Answer requests to the metrics address."""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

import msgspec

import pykubeproxy
from pykubeproxy import http
from pykubeproxy.agent.observe.metrics import Slis, scraped
from pykubeproxy.agent.observe.status_html import status_page
from pykubeproxy.config import EMULATED, Config, configz, dump, flag_values, flagz, yaml
from pykubeproxy.http.accept import preferred, ranges
from pykubeproxy.pages import servicez
from pykubeproxy.pages.kube_proxy import DEPRECATED, GROUP, VERSIONS, FlagzPage, NotAcceptable, StatuszPage
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
_YAML, _PLAIN = "application/yaml", "text/plain"
_FORMS = (http.JSON, _YAML, _PLAIN)


def metrics_pages(
    metrics: Callable[[], http.Response],
    config: Config,
    flags: Mapping[str, object],
    status: Callable[[PageFilter], AgentStatus] | None = None,
    objects: Callable[[PageFilter, bool], NodeObjects | None] | None = None,
) -> http.Handler:
    """Return /metrics and the pages about configuration, version and status; none of them contains a secret.

    `flags` are those of the command line. Pages about Services are for clients on this node only, see `is_local`: with
    `status`, /statusz is HTML or JSON for those that accept it, and / leads browsers there; with `objects`, /servicez is
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
        table["/flagz"] = lambda request: flagz_page(request, shown)
    paths = sorted(table)
    table |= {
        "/healthz/ping": lambda _: http.text("ok"),
        "/metrics/slis": lambda request: scraped(slis.metrics(request), request, started),
    }
    if config.feature_gates.serves_page("ComponentStatusz"):
        table["/statusz"] = lambda request: statusz_page(request, started, paths)
    plain = http.router(table)

    def page(request: http.Request) -> http.Response:
        if not is_local(request):
            return plain(request)
        if request.path == "/servicez" and objects:
            all_slices = "slices=all" in request.query.split("&")
            return _filtered(request, lambda filter_: _objects(objects(filter_, all_slices), config))
        if request.path in ("/", "/statusz") and status:
            content_type = preferred(request.headers.get("accept", ""), (http.TEXT, http.HTML, http.JSON))
            if request.path == "/" and content_type == http.HTML:
                return http.Response(status=302, headers=(("Location", "/statusz"), *_BROWSER_HEADERS))
            if request.path == "/statusz" and content_type != http.TEXT:
                refresh = "refresh=on" in request.query.split("&")
                return _filtered(request, lambda filter_: _status(status(filter_), content_type, refresh))
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


def _filtered(request: http.Request, make: Callable[[PageFilter], http.Response]) -> http.Response:
    try:
        filter_ = read_filter(request.query)
    except ValueError as error:
        return http.Response(f"400 bad request: {error}\n".encode(), status=400)
    return make(filter_)


def _status(status: AgentStatus, content_type: str, refresh: bool) -> http.Response:
    body = encode(status) if content_type == http.JSON else status_page(status, refresh).encode()
    return http.Response(body, content_type, headers=_BROWSER_HEADERS)


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


class _PageForm(NamedTuple):
    """A media type, and the version of the API object; "" for text."""

    media_type: str
    version: str = ""


def flagz_page(request: http.Request, flags: Mapping[str, str]) -> http.Response:
    """Return /flagz for these values of flags."""
    return _page(
        request, "Flagz", lambda: flagz(flags), lambda version: FlagzPage(api_version=version, flags=flags)
    )


def statusz_page(request: http.Request, started: float, paths: Sequence[str]) -> http.Response:
    """Return /statusz, which lists these paths; `started` is in seconds since 1970."""
    uptime = max(0, int(time.time() - started))

    def content(version: str) -> StatuszPage:
        return StatuszPage(
            api_version=version,
            start_time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
            uptime_seconds=uptime,
            binary_version=pykubeproxy.__version__,
            emulation_version=EMULATED,
            paths=tuple(paths),
        )

    return _page(request, "Statusz", lambda: statusz(started, uptime, paths), content)


def statusz(started: float, uptime: int, paths: Sequence[str]) -> str:
    """Return the text of /statusz after so many seconds."""
    minutes, seconds = divmod(uptime, 60)
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


def _page(
    request: http.Request,
    kind: str,
    text: Callable[[], str],
    content: Callable[[str], FlagzPage | StatuszPage],
) -> http.Response:
    """Return a page as text, or as an API object of the version that the client names."""
    form = _form(request.headers.get("accept", ""), kind)
    if form is None:
        refusal = NotAcceptable(message=f"only the following media types are accepted: {', '.join(_FORMS)}")
        return http.Response(_encode(http.JSON, refusal), http.JSON, refusal.code)
    if not form.version:
        return http.text(text())
    warning = (
        f'299 - "This version of the {kind.lower()} endpoint is deprecated. Please use a newer version."'
    )
    return http.Response(
        _encode(form.media_type, content(f"{GROUP}/{form.version}")),
        f"{form.media_type};g={GROUP};v={form.version};as={kind}",
        headers=(("Warning", warning),) if form.version == DEPRECATED else (),
    )


def _form(accept: str, kind: str) -> _PageForm | None:
    """Return the form that a client prefers; None if there is none. JSON and YAML need the parameters g, v and as."""
    if not accept.strip():
        return _PageForm(_PLAIN)
    for wanted in sorted(ranges(accept), key=lambda entry: (-entry.weight, entry.value.count("*"))):
        group, version, as_kind = (wanted.parameters.get(name) for name in ("g", "v", "as"))
        for media_type in _FORMS:
            if not wanted.covers(media_type):
                continue
            if media_type == _PLAIN and not (group or version or as_kind):
                return _PageForm(_PLAIN)
            if media_type != _PLAIN and (group, as_kind) == (GROUP, kind) and version in VERSIONS:
                return _PageForm(media_type, version)
    return None


def _encode(media_type: str, page: FlagzPage | StatuszPage | NotAcceptable) -> bytes:
    if media_type == _YAML:
        return yaml.dump(dict(sorted(msgspec.to_builtins(page).items()))).encode()
    return msgspec.json.encode(page) + b"\n"
