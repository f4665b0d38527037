"""/flagz and /statusz as kube-proxy serves them: text, or an API object as JSON or YAML if the client names its kind."""

import platform
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

import pykubeproxy
from pykubeproxy import http
from pykubeproxy.config import EMULATED, flagz, yaml
from pykubeproxy.http.accept import ranges

# The exact text of kube-proxy, which monitoring may match.
_STATUSZ_HEAD = (
    "\nkube-proxy statusz\nWarning: This endpoint is not meant to be machine parseable, has no formatting"
    " compatibility guarantees and is for debugging purposes only.\n"
)
_YAML, _PLAIN = "application/yaml", "text/plain"
_GROUP, _DEPRECATED = "config.k8s.io", "v1alpha1"
_VERSIONS = ("v1beta1", _DEPRECATED)


class Uptime(NamedTuple):
    """When the process started, and the time now, in seconds since 1970."""

    started: float
    now: float

    @property
    def seconds(self) -> int:
        return max(0, int(self.now - self.started))


class _Form(NamedTuple):
    """A media type, and the version of the API object; "" for text."""

    media_type: str
    version: str = ""


def flagz_page(request: http.Request, flags: Mapping[str, str]) -> http.Response:
    """Return /flagz for these values of flags."""
    return _page(request, "Flagz", lambda: flagz(flags), {"flags": flags})


def statusz_page(request: http.Request, uptime: Uptime, paths: list[str]) -> http.Response:
    """Return /statusz, which lists these paths."""
    content = {
        "startTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(uptime.started)),
        "uptimeSeconds": uptime.seconds,
        "goVersion": "",
        "binaryVersion": pykubeproxy.__version__,
        "emulationVersion": EMULATED,
        "paths": paths,
    }
    return _page(request, "Statusz", lambda: statusz(uptime, paths), content)


def statusz(uptime: Uptime, paths: list[str]) -> str:
    """Return the text of /statusz."""
    minutes, seconds = divmod(uptime.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    start = time.gmtime(uptime.started)
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
    request: http.Request, kind: str, text: Callable[[], str], content: Mapping[str, object]
) -> http.Response:
    form = _form(request.headers.get("accept", ""), kind)
    if form is None:
        return _not_acceptable()
    if not form.version:
        return http.text(text())
    head = {"kind": kind, "apiVersion": f"{_GROUP}/{form.version}", "metadata": {"name": "kube-proxy"}}
    page = kind.lower()
    warning = f'299 - "This version of the {page} endpoint is deprecated. Please use a newer version."'
    return http.Response(
        _encode(form.media_type, {**head, **content}),
        f"{form.media_type};g={_GROUP};v={form.version};as={kind}",
        headers=(("Warning", warning),) if form.version == _DEPRECATED else (),
    )


def _form(accept: str, kind: str) -> _Form | None:
    """Return the form that a client prefers; None if there is none. JSON and YAML need the parameters g, v and as."""
    if not accept.strip():
        return _Form(_PLAIN)
    for wanted in sorted(ranges(accept), key=lambda it: (-it.weight, it.value.count("*"))):
        group, version, as_kind = (wanted.parameters.get(name) for name in ("g", "v", "as"))
        for media_type in (http.JSON, _YAML, _PLAIN):
            if not wanted.covers(media_type):
                continue
            if media_type == _PLAIN and not (group or version or as_kind):
                return _Form(_PLAIN)
            if media_type != _PLAIN and (group, as_kind) == (_GROUP, kind) and version in _VERSIONS:
                return _Form(media_type, version)
    return None


def _encode(media_type: str, content: Mapping[str, object]) -> bytes:
    if media_type == _YAML:
        return yaml.dump(dict(sorted(content.items()))).encode()
    return msgspec.json.encode(content) + b"\n"


def _not_acceptable() -> http.Response:
    types = ", ".join((http.JSON, _YAML, _PLAIN))
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": f"only the following media types are accepted: {types}",
        "reason": "NotAcceptable",
        "code": 406,
    }
    return http.Response(_encode(http.JSON, status), http.JSON, 406)
