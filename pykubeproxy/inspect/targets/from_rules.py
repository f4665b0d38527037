"""Services as the rules of a node name them, where there are no objects to ask."""

from collections.abc import Iterable

import msgspec

from pykubeproxy.inspect.dump.model import find_ports
from pykubeproxy.inspect.filter import ServiceFilter
from pykubeproxy.objects import Key, Port, Protocol, Service
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.frontend import Frontend, FrontendKind
from pykubeproxy.services.ports import PortName

_PROTOCOLS = {it.value for it in Protocol}
_FIELDS = {
    FrontendKind.CLUSTER_IP: "cluster_ips",
    FrontendKind.EXTERNAL_IP: "external_ips",
    FrontendKind.LOAD_BALANCER_IP: "load_balancer_ips",
}


def services_of(rulesets: Iterable[Ruleset], filter_: ServiceFilter | None = None) -> tuple[Service, ...]:
    """Return the matching Services with the frontends that the rules of both families serve or reject."""
    found: dict[PortName, list[Frontend]] = {}
    for ruleset in rulesets:
        for name, rules in find_ports(ruleset, filter_ or ServiceFilter()).items():
            found.setdefault(name, []).extend(it.frontend for it in (*rules.serving, *rules.rejecting))
    services: dict[Key, Service] = {}
    for name, frontends in found.items():
        # A chain without comments has no name; rules of other programs may have any protocol.
        if name.namespace and name.protocol.upper() in _PROTOCOLS:
            services[name.service_key] = _with_port(services.get(name.service_key), name, frontends)
    return tuple(services.values())


def _with_port(service: Service | None, name: PortName, frontends: Iterable[Frontend]) -> Service:
    service = service or Service(name.namespace, name.service)
    number = node_port = 0
    addresses: dict[str, tuple[str, ...]] = {}
    for frontend in frontends:
        if field := _FIELDS.get(frontend.kind):
            number = frontend.port
            addresses[field] = (*addresses.get(field, getattr(service, field)), frontend.address)
        else:
            node_port = frontend.port
    unique = {field: tuple(dict.fromkeys(some)) for field, some in addresses.items()}
    port = Port(name.port, Protocol(name.protocol.upper()), number, node_port)
    return msgspec.structs.replace(service, ports=(*service.ports, port), **unique)
