"""Which services somebody asks for."""

from collections.abc import Collection

import msgspec

from pykubeproxy.services.ports import PortName


class Wanted(msgspec.Struct, frozen=True):
    """The services and ports to show; what is empty leaves all open. `port` is a port's name or its number."""

    namespace: str = ""
    name: str = ""
    port: str = ""

    def matches(self, name: PortName, numbers: Collection[int]) -> bool:
        """Whether a service port is among them; `numbers` are the ports at which it is reached."""
        return (
            self.namespace in ("", name.namespace)
            and self.name in ("", name.service)
            and (self.port in ("", name.port) or (self.port.isdecimal() and int(self.port) in numbers))
        )

    def __str__(self) -> str:
        name = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"{name}:{self.port}" if self.port else name


def parse_wanted(text: str, namespace: str = "") -> Wanted:
    """Read "name", "namespace/name" or either with ":port". Raises ValueError, in a line."""
    before, slash, rest = text.rpartition("/")
    name, colon, port = rest.partition(":")
    if "/" in before or (slash and not before) or (text and not name) or (colon and not port):
        raise ValueError(f'"{text}" is not of the form name, namespace/name or namespace/name:port')
    if before and namespace and before != namespace:
        raise ValueError(f'"{text}" is not in namespace {namespace}')
    return Wanted(before or namespace, name, port)
