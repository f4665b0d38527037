"""Objects for tests, with what a test does not care about filled in."""

from pykubeproxy.objects import (
    Endpoint,
    EndpointPort,
    EndpointSlice,
    Event,
    Family,
    Port,
    Protocol,
    Service,
    Updated,
    family_of,
)
from pykubeproxy.services.cluster import Cluster


def service(name: str = "web", *, cluster_ip: str = "10.96.0.10", **fields: object) -> Service:
    """A Service ns/NAME with one TCP port http, 80."""
    defaults: dict[str, object] = {"cluster_ips": (cluster_ip,), "ports": (Port("http", Protocol.TCP, 80),)}
    return Service("ns", name, **{**defaults, **fields})  # type: ignore[arg-type]


def endpoint(address: str, **fields: object) -> Endpoint:
    """A ready endpoint; `terminating` alone makes it unready too, as Kubernetes does."""
    if fields.get("terminating"):
        fields.setdefault("ready", False)
    return Endpoint(address, **fields)  # type: ignore[arg-type]


def slice_of(
    *endpoints: Endpoint | str,
    service: str = "web",
    name: str = "",
    ports: tuple[EndpointPort, ...] = (EndpointPort("http", Protocol.TCP, 8080),),
    **fields: object,
) -> EndpointSlice:
    """An EndpointSlice of ns/SERVICE; addresses stand for ready endpoints."""
    made = tuple(endpoint(it) if isinstance(it, str) else it for it in endpoints)
    family = family_of(made[0].address) if made else Family.IPV4
    name = name or f"{service}-{family.value.lower()}"
    return EndpointSlice("ns", name, service, family, made, ports, **fields)  # type: ignore[arg-type]


def cluster_of(*objects: Service | EndpointSlice) -> Cluster:
    """A Cluster with these objects, added in their order."""
    made = Cluster()
    for each in objects:
        made.apply(Updated(each))
    return made


def numbered(*numbers: int) -> list[Event]:
    """Services svcN with an endpoint each; the number is in their name, address and endpoint."""
    return [
        event
        for number in numbers
        for event in (
            Updated(service(f"svc{number}", cluster_ip=f"10.96.{number // 250}.{number % 250}")),
            Updated(slice_of(f"10.244.{number // 250}.{number % 250}", service=f"svc{number}")),
        )
    ]
