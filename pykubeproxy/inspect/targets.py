"""Names on the command line: pods, Services, nodes and addresses, and filters of Services.

    source = parse_source("pod/default/client")
    destination = parse_destination("svc/default/web:http")

`pykubeproxy.inspect.connection` finds their addresses.
"""

import enum
import ipaddress
import re
from collections.abc import Collection

import msgspec

from pykubeproxy.objects import Key, address_and_port
from pykubeproxy.services.ports import PortName

DEFAULT_NAMESPACE = "default"
_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9](?:[-.a-z0-9]{0,251}[a-z0-9])?")
_LAST_PORT = 65535


class TargetKind(enum.Enum):
    """The kind of a target; the value is the prefix in its text."""

    ADDRESS = ""
    POD = "pod"
    SERVICE = "svc"
    NODE = "node"


# As kubectl spells them.
KIND_PREFIXES = {
    **dict.fromkeys(("pod", "pods", "po"), TargetKind.POD),
    **dict.fromkeys(("svc", "service", "services"), TargetKind.SERVICE),
    **dict.fromkeys(("node", "nodes", "no"), TargetKind.NODE),
}
# Objects that people name too, and that are no end of a connection.
_WORKLOADS = {
    **dict.fromkeys(("deploy", "deployment", "deployments"), "Deployment"),
    **dict.fromkeys(("rs", "replicaset", "replicasets"), "ReplicaSet"),
    **dict.fromkeys(("sts", "statefulset", "statefulsets"), "StatefulSet"),
    **dict.fromkeys(("ds", "daemonset", "daemonsets"), "DaemonSet"),
    **dict.fromkeys(("job", "jobs"), "Job"),
    **dict.fromkeys(("ing", "ingress", "ingresses"), "Ingress"),
}
SOURCE_FORMS = "pod/NAME, pod/NAMESPACE/NAME, node/NAME or an IP address"
DESTINATION_FORMS = (
    "svc/NAME[:PORT], svc/NAMESPACE/NAME[:PORT], NAME.NAMESPACE[:PORT], pod/NAMESPACE/NAME:PORT, node/NAME:PORT, "
    "address:port or [address]:port for IPv6"
)

SERVICE_FORMS = "[svc/][NAMESPACE/]NAME[:PORT] or NAME.NAMESPACE[:PORT]"


class Target(msgspec.Struct, frozen=True):
    """One end of a connection as a user names it.

    - `name`: the name of an object, or a canonical IP address
    - `namespace`: "" for nodes and addresses
    - `port`: its name or number, "" if not given
    """

    kind: TargetKind
    name: str
    namespace: str = ""
    port: str = ""

    @property
    def key(self) -> Key:
        """The key of the object."""
        return Key(self.namespace, self.name)

    @property
    def without_port(self) -> str:
        """The text without the port."""
        return f"{self.kind.value}/{self.key}" if self.kind.value else self.name

    def __str__(self) -> str:
        """Return text such as "svc/default/web:http"."""
        if not self.port:
            return self.without_port
        if self.kind is TargetKind.ADDRESS:
            return address_and_port(self.name, int(self.port))
        return f"{self.without_port}:{self.port}"


class InvalidTarget(ValueError):
    """A text names no target; str() is one line with the forms that do."""


def parse_source(text: str, namespace: str = "") -> Target:
    """Parse pod/[NAMESPACE/]NAME, node/NAME or an address; `namespace` is that of a name without one.

    Raises InvalidTarget.
    """
    if target := _with_prefix(text, namespace or DEFAULT_NAMESPACE):
        if target.kind is TargetKind.SERVICE:
            raise InvalidTarget(f'"{text}" is a Service, which sends nothing; use {SOURCE_FORMS}')
        if target.port:
            raise InvalidTarget(f'"{text}" has a port; a source has none, use {target.without_port}')
        return target
    try:
        return Target(TargetKind.ADDRESS, _address(text))
    except ValueError:
        raise InvalidTarget(f'"{text}" is not an IP address; use {SOURCE_FORMS}') from None


def parse_destination(text: str, namespace: str = "") -> Target:
    """Parse the name of a Service, pod or node, or an address, each with a port.

    Services have the forms svc/[NAMESPACE/]NAME, NAMESPACE/NAME, NAME.NAMESPACE and NAME.NAMESPACE.svc.DOMAIN; their
    port may be missing. `namespace` is that of a name without one. Raises InvalidTarget.
    """
    namespace = namespace or DEFAULT_NAMESPACE
    target = _with_prefix(text, namespace) or _address_target(text) or _service(text, namespace)
    if target is None:
        raise InvalidTarget(f'"{text}" names no destination; use {DESTINATION_FORMS}')
    if target.kind is TargetKind.NODE and not target.port:
        raise InvalidTarget(f'"{text}" has no port; use {text}:PORT')
    if target.kind is TargetKind.NODE and not target.port.isdecimal():
        raise InvalidTarget(
            f'"{text}" has a name as port, but ports of nodes have none; use {target.without_port}:NUMBER'
        )
    return target


def parse_service(text: str, namespace: str = "") -> Target:
    """Parse a Service with an optional port; `namespace` is "" if unknown. Raises InvalidTarget."""
    prefix, slash, rest = text.partition("/")
    _refuse_workload(prefix if slash else "", rest)
    if slash and KIND_PREFIXES.get(prefix.lower()) is TargetKind.SERVICE:
        target = _named(TargetKind.SERVICE, rest, namespace)
    else:
        target = _service(text, namespace)
    if target is None:
        raise InvalidTarget(f'"{text}" is not of the form {SERVICE_FORMS}')
    return target


def is_service_name(text: str) -> bool:
    """Return whether a text has the prefix of a Service, or the form of a DNS name."""
    prefix, slash, _ = text.partition("/")
    return (bool(slash) and KIND_PREFIXES.get(prefix.lower()) is TargetKind.SERVICE) or "." in text.partition(
        ":"
    )[0]


def _refuse_workload(prefix: str, rest: str) -> None:
    """Raise InvalidTarget for a prefix of a workload or an Ingress."""
    if workload := _WORKLOADS.get(prefix.lower()):
        raise InvalidTarget(
            f"no connection ends at {_article(workload)} {workload}: name one of its pods, as pod/NAME, or its"
            f" Service, such as svc/{rest.rpartition('/')[2] or 'NAME'}"
        )


def _article(word: str) -> str:
    return "an" if word[0] in "AEIOU" else "a"


def _with_prefix(text: str, namespace: str) -> Target | None:
    """Parse a text with the prefix of a kind. Return None if it has none; raise InvalidTarget if the rest is wrong."""
    prefix, slash, rest = text.partition("/")
    kind = KIND_PREFIXES.get(prefix.lower()) if slash else None
    if kind is None:
        _refuse_workload(prefix, rest)
        return None
    target = _named(kind, rest, namespace)
    if target is None:
        form = "node/NAME" if kind is TargetKind.NODE else f"{kind.value}/[NAMESPACE/]NAME"
        raise InvalidTarget(f'"{text}" is not of the form {form}[:PORT]')
    return target


def _named(kind: TargetKind, text: str, namespace: str) -> Target | None:
    """Parse [NAMESPACE/]NAME[:PORT]."""
    path, colon, port = text.partition(":")
    before, slash, name = path.rpartition("/")
    if (colon and not _is_port(port)) or (slash and not _LABEL.fullmatch(before)):
        return None
    if kind is TargetKind.NODE:
        return None if slash or not _SUBDOMAIN.fullmatch(name) else Target(kind, name, "", port)
    if not (_SUBDOMAIN if kind is TargetKind.POD else _LABEL).fullmatch(name):
        return None
    return Target(kind, name, before or namespace, port)


def _service(text: str, namespace: str) -> Target | None:
    """Parse a Service as dump-rules names it, or as DNS does."""
    path, colon, port = text.partition(":")
    if "." not in path:
        return _named(TargetKind.SERVICE, text, namespace)
    name, _, rest = path.removesuffix(".").partition(".")
    found, *domain = rest.split(".")
    if (colon and not _is_port(port)) or not all(map(_LABEL.fullmatch, (name, found, *domain))):
        return None
    if len(domain) > 1 and domain[1] == "svc":
        raise InvalidTarget(
            f'"{text}" names one pod of Service {domain[0]}/{found}; use pod/{domain[0]}/{name}'
        )
    if (domain and domain[0] != "svc") or found.isdecimal():
        return None
    return Target(TargetKind.SERVICE, name, found, port)


def _address_target(text: str) -> Target | None:
    """Parse address:port or [address]:port. Return None if there is no address."""
    host, _, port = text.rpartition(":")
    if _is_address(text):
        raise InvalidTarget(f'"{text}" has no port; use {_bracketed(text)}:PORT')
    if not _is_address(host):
        return None
    if not (port.isdecimal() and _is_port(port)):
        raise InvalidTarget(f'"{text}" has no port from 1 to {_LAST_PORT}; use {_bracketed(host)}:PORT')
    # Without brackets, the last group of an IPv6 address looks like a port.
    if ":" in host and host[0] != "[":
        raise InvalidTarget(f'"{text}" has no brackets; use {_bracketed(host)}:{port}')
    return Target(TargetKind.ADDRESS, _address(host), "", str(int(port)))


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address and address[0] != "[" else address


def _is_address(text: str) -> bool:
    try:
        _address(text)
    except ValueError:
        return False
    return True


def _address(text: str) -> str:
    """Return a canonical address, without brackets. Raises ValueError."""
    if "%" in text:
        raise ValueError("rules cannot match zones")
    return str(ipaddress.ip_address(text[1:-1] if text[:1] + text[-1:] == "[]" else text))


def _is_port(text: str) -> bool:
    """Return whether a text is the name of a port, or a number from 1 to 65535."""
    if text.isascii() and text.isdecimal():
        return 0 < int(text) <= _LAST_PORT if len(text) < 6 else False
    return bool(_LABEL.fullmatch(text))


class ServiceFilter(msgspec.Struct, frozen=True):
    """Which services and ports to show; an empty field matches all. `port` is a port's name or number."""

    namespace: str = ""
    name: str = ""
    port: str = ""

    def matches(self, name: PortName, numbers: Collection[int]) -> bool:
        """Return whether a service port with frontends at these port numbers matches."""
        return (
            self.namespace in ("", name.namespace)
            and self.name in ("", name.service)
            and (self.port in ("", name.port) or (self.port.isdecimal() and int(self.port) in numbers))
        )

    def __str__(self) -> str:
        name = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"{name}:{self.port}" if self.port else name


def parse_filter(text: str, namespace: str = "") -> ServiceFilter:
    """Parse the name of a Service, as `parse_service` does, or of a chain. Raises ValueError with one line."""
    if is_service_name(text):
        service = parse_service(text, namespace)
        found = ServiceFilter(service.namespace, service.name, service.port)
    else:
        before, slash, rest = text.rpartition("/")
        name, colon, port = rest.partition(":")
        if "/" in before or (slash and not before) or (text and not name) or (colon and not port):
            raise ValueError(f'"{text}" is not of the form {SERVICE_FORMS}')
        found = ServiceFilter(before or namespace, name, port)
    if namespace and found.namespace != namespace:
        raise ValueError(f'"{text}" is not in namespace {namespace}; remove one of both namespaces')
    return found


def parse_title(title: str, protocol: str) -> PortName:
    """Parse "namespace/name:port" or "namespace/name", as rule comments name a service port."""
    namespace, _, rest = title.partition("/")
    service, _, port = rest.partition(":")
    return PortName(namespace, service, port, protocol)
