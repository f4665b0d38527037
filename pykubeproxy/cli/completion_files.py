"""Names for completion from the files of -f, --rules and --bundle, without the libraries that read such files in full."""

import gzip
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pykubeproxy.objects import Key
from pykubeproxy.services.ports import PortName

if TYPE_CHECKING:
    from pykubeproxy.bundle.read import Bundle

# A completion must not take seconds: larger files give no names.
_MOST_JSON, _MOST_YAML, _MOST_RULES = 64 << 20, 1 << 20, 64 << 20
_MOST_BUNDLE = 8 << 20  # compressed
_SUFFIXES = (".yaml", ".yml", ".json")
_GZIP = b"\x1f\x8b"
# A service port in the comment of a rule: "default/web:http cluster IP" or "default/web:http -> 10.0.0.1:80".
_TITLE = re.compile(rb'--comment "?([a-z0-9][-a-z0-9]*)/([a-z0-9][-a-z0-9]*)(?::([-a-z0-9]+))?[ "]')


class KnownNames(NamedTuple):
    """Service ports, pods and nodes; names that occur twice may be there twice."""

    ports: Sequence[PortName] = ()
    pods: Sequence[Key] = ()
    nodes: Sequence[str] = ()


class _Metadata(msgspec.Struct, gc=False):
    name: str = ""
    namespace: str = "default"


class _Object(msgspec.Struct, gc=False):
    kind: str = ""
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: msgspec.Raw = msgspec.Raw(b"{}")
    endpoints: msgspec.Raw = msgspec.Raw(b"[]")
    items: list[msgspec.Raw] = []


class _Port(msgspec.Struct, gc=False):
    name: str | None = None


class _ServiceSpec(msgspec.Struct, gc=False):
    ports: list[_Port] | None = None


class _TargetRef(msgspec.Struct, gc=False):
    name: str | None = None


class _Endpoint(msgspec.Struct, gc=False):
    targetRef: _TargetRef | None = None  # noqa: N815
    nodeName: str | None = None  # noqa: N815


def names_in_objects(path: str) -> KnownNames:
    """Return the names in a file or a folder with objects. Raises OSError, ValueError and YAMLError."""
    root = Path(path)
    files = [it for it in sorted(root.iterdir()) if it.suffix in _SUFFIXES] if root.is_dir() else [root]
    objects = [it for file in files for raw in _documents(file) for it in _objects(raw)]
    endpoints = [(it.metadata.namespace, one) for it in objects for one in _endpoints(it)]
    return KnownNames(
        ports=[
            PortName(it.metadata.namespace, it.metadata.name, port.name or "", "TCP")
            for it in objects
            if it.kind == "Service"
            for port in msgspec.json.decode(it.spec, type=_ServiceSpec).ports or [_Port()]
        ],
        pods=[
            *(Key(it.metadata.namespace, it.metadata.name) for it in objects if it.kind == "Pod"),
            *(Key(namespace, it.targetRef.name or "") for namespace, it in endpoints if it.targetRef),
        ],
        nodes=[
            *(it.metadata.name for it in objects if it.kind == "Node"),
            *(it.nodeName for _, it in endpoints if it.nodeName),
        ],
    )


def names_in_rules(paths: Sequence[str]) -> KnownNames:
    """Return the service ports that comments in files with output of iptables-save name. Raises OSError."""
    return names_in_texts(_rules(Path(path)) for path in paths)


def names_in_texts(texts: Iterable[bytes]) -> KnownNames:
    """Return the service ports that comments in output of iptables-save name."""
    found = {match.groups(default=b"") for text in texts for match in _TITLE.finditer(text)}
    ports = [(it.decode() for it in names) for names in found]
    return KnownNames([PortName(namespace, name, port, "TCP") for namespace, name, port in ports])


def small_bundle(path: str) -> "Bundle":
    """Read a bundle. Raises OSError, ValueError, which includes a bundle that takes seconds."""
    from pykubeproxy.bundle.read import read_bundle

    if not Path(path).is_file() or Path(path).stat().st_size > _MOST_BUNDLE:
        raise ValueError(f"{path} is no small file")
    with Path(path).open("rb") as file:
        return read_bundle(file, path)


def _rules(path: Path) -> bytes:
    if path.stat().st_size > _MOST_RULES:
        return b""
    raw = path.read_bytes()
    if raw.startswith(_GZIP):
        with gzip.open(path) as unpacked:
            return unpacked.read(_MOST_RULES)
    return raw


def _documents(path: Path) -> Iterator[bytes]:
    """Yield each document of a regular file as JSON."""
    size = path.stat().st_size if path.is_file() else _MOST_JSON + 1
    if size > _MOST_JSON:
        return
    text = path.read_bytes()
    if text.lstrip()[:1] == b"{":
        yield text
    elif size <= _MOST_YAML:
        from pykubeproxy.config import yaml

        for document in yaml.documents(text):
            yield msgspec.json.encode(document.content)


def _objects(raw: bytes | msgspec.Raw, kind: str = "") -> Iterator[_Object]:
    """Yield an object, or the items of a List; skip what is neither."""
    try:
        found = msgspec.json.decode(raw, type=_Object)
    except ValueError:
        return
    for item in found.items:
        yield from _objects(item, found.kind.removesuffix("List"))
    yield found if found.kind or not kind else msgspec.structs.replace(found, kind=kind)


def _endpoints(object_: _Object) -> Sequence[_Endpoint]:
    if object_.kind != "EndpointSlice":
        return ()
    return msgspec.json.decode(object_.endpoints, type=list[_Endpoint] | None) or ()
