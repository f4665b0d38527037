"""Names of services on the command line and in rules."""

from collections.abc import Collection

import msgspec

from pykubeproxy.inspect.targets.parse import SERVICE_FORMS, is_service_name, parse_service
from pykubeproxy.services.ports import PortName


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
