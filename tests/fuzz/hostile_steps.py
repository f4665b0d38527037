"""Steps of a tenant who may write Services and EndpointSlices, and of the victim beside them, as JSON objects.

Objects are hostile in size, overlap and depth, but most of them pass the validation of an API server.
"""

import itertools
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, Literal

import msgspec
from hypothesis import strategies as st

from pykubeproxy.objects import Family
from tests.hostile import nested_addresses

Json = dict[str, Any]

LONG = "x" * 63
VICTIM = ("default", "victim")
NODE_IP = {Family.IPV4: "192.168.99.10", Family.IPV6: "fd00:99::10"}
CLUSTER_IP = {Family.IPV4: "10.96.9.9", Family.IPV6: "fd00:10:96::909"}
EXTERNAL_IP = {Family.IPV4: "192.0.2.9", Family.IPV6: "2001:db8:2::9"}
BALANCER_IP = {Family.IPV4: "198.51.100.9", Family.IPV6: "2001:db8:51::9"}
SOURCES = {Family.IPV4: "203.0.113.0/24", Family.IPV6: "2001:db8:9::/64"}
# Port, protocol, node port and port of the endpoints.
VICTIM_PORTS = {"web": (80, "TCP", 30909, 8080), "dns": (53, "UDP", 30910, 5353)}
# Services of the tenant, by namespace and name: before and after the victim in order, and as long as names may be.
SLOTS = (
    ("aaa", "a"),
    ("default", "victi"),
    ("default", "victim-0"),
    ("other", "victim"),
    (LONG, LONG),
    ("zzz", "z"),
)
_ODD = (
    "0.0.0.0",
    "127.0.0.1",
    "::1",
    "224.0.0.1",
    "fe80::1",
    "::ffff:10.96.9.9",
    "010.096.009.009",
    "::10.96.9.9",
)


class Scale(msgspec.Struct, frozen=True):
    """How large objects get: addresses for each prefix, ports, endpoints of a slice, slices, and other lists.

    For moves: the characters of a long text, the ports and endpoints of the largest Service and of one just under the
    limit for a deferred sync, how many of these, and the ports of a Service without endpoints and at the node's address.
    """

    copies: int
    ports: int
    endpoints: int
    slices: int
    list: int
    text: int
    largest: tuple[int, int]
    under: tuple[int, int]
    services: int
    unserved: int
    at_node: int


SMALL = Scale(
    copies=8,
    ports=8,
    endpoints=20,
    slices=3,
    list=30,
    text=5000,
    largest=(8, 12),
    under=(4, 5),
    services=4,
    unserved=30,
    at_node=1450,
)
# Up to 48,000 pairs of a port and an endpoint in one Service, and the most that an API server stores in an object.
LARGE = Scale(
    copies=20,
    ports=16,
    endpoints=250,
    slices=4,
    list=1000,
    text=1_400_000,
    largest=(400, 120),
    under=(50, 100),
    services=16,
    unserved=11_000,
    at_node=3000,
)


class Step(msgspec.Struct, frozen=True):
    """Write an object, or delete it."""

    do: Literal["write", "delete"]
    item: Json


def pod(family: Family, number: int) -> str:
    """Return an endpoint of the victim."""
    return f"10.244.9.{number}" if family is Family.IPV4 else f"fd00:10:244:9::{number:x}"


def victim_service() -> Json:
    """Return a Service with all kinds of addresses in both families."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "victim", "namespace": "default"},
        "spec": {
            "type": "LoadBalancer",
            "clusterIPs": list(CLUSTER_IP.values()),
            "clusterIP": CLUSTER_IP[Family.IPV4],
            "ipFamilies": ["IPv4", "IPv6"],
            "ipFamilyPolicy": "RequireDualStack",
            "externalIPs": list(EXTERNAL_IP.values()),
            "loadBalancerSourceRanges": list(SOURCES.values()),
            "ports": [
                {"name": name, "port": port, "protocol": protocol, "nodePort": node_port}
                for name, (port, protocol, node_port, _) in VICTIM_PORTS.items()
            ],
        },
        "status": {"loadBalancer": {"ingress": [{"ip": ip} for ip in BALANCER_IP.values()]}},
    }


def victim_slice(family: Family, ready: int, unready: int = 0) -> Json:
    """Return the victim's EndpointSlice of one family, with its first endpoints ready."""
    ports = [
        {"name": name, "port": target, "protocol": protocol}
        for name, (_, protocol, _, target) in VICTIM_PORTS.items()
    ]
    endpoints = [
        {"addresses": [pod(family, n)], "conditions": {"ready": n <= ready}}
        for n in range(1, ready + unready + 1)
    ]
    return _slice(VICTIM, f"victim-{family.value.lower()}", family, endpoints, ports)


def victim_steps() -> st.SearchStrategy[list[Step]]:
    """Change the number of the victim's endpoints in both families."""
    return st.builds(
        lambda ready, unready: [Step("write", victim_slice(family, ready, unready)) for family in Family],
        st.integers(0, 3),
        st.integers(0, 2),
    )


def hostile_steps(scale: Scale) -> st.SearchStrategy[list[Step]]:
    """Write a Service with endpoints, a Service, or some EndpointSlices of the tenant; or delete a Service."""
    slots = st.sampled_from(SLOTS)
    served = slots.flatmap(
        lambda slot: _services(scale, slot).flatmap(
            lambda item: _slices(scale, slot, item["spec"]["ports"]).map(lambda slices: [item, *slices])
        )
    )
    written = st.one_of(
        served,
        served,
        served,
        slots.flatmap(lambda slot: _services(scale, slot)).map(lambda item: [item]),
        slots.flatmap(lambda slot: _slices(scale, slot)),
    )
    return st.one_of(
        *[written.map(lambda items: [Step("write", item) for item in items])] * 4,
        slots.map(lambda slot: [Step("delete", _service(slot, {}))]),
    )


def sequences(scale: Scale, longest: int) -> st.SearchStrategy[list[list[Step]]]:
    """Return batches of steps; the agent syncs after each batch. Moves consist of several batches."""
    batch = st.one_of(hostile_steps(scale), hostile_steps(scale), hostile_steps(scale), victim_steps())
    move = st.sampled_from(sorted(MOVES)).map(lambda name: MOVES[name](scale))
    part = st.one_of(batch.map(lambda steps: [steps]), batch.map(lambda steps: [steps]), move)
    return st.lists(part, min_size=longest // 2, max_size=longest).map(
        lambda parts: [steps for batches in parts for steps in batches]
    )


# The namespace of moves, and the prefix of their endpoints.
_MOVES, _PODS = "moves", "10.244"
_PROXY_NAME = "service.kubernetes.io/service-proxy-name"
_AFFINITY = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 10800}}}


def _move_service(name: str, ports: int, **spec: Any) -> Json:
    made = [{"name": f"p{n}", "port": 1000 + n, "protocol": "TCP"} for n in range(ports)]
    return _service((_MOVES, name), {"type": "ClusterIP", "ports": made, **spec})


def _move_slices(name: str, size: tuple[int, int], **fields: Any) -> list[Json]:
    """Return EndpointSlices with so many ports and endpoints, of which each has these fields too."""
    ports, endpoints = size
    named = [{"name": f"p{n}", "port": 8080, "protocol": "TCP"} for n in range(ports)]
    pods = [{"addresses": [f"{_PODS}.{200 + n // 250}.{1 + n % 250}"], **fields} for n in range(endpoints)]
    return [_slice((_MOVES, name), f"{name}-0", Family.IPV4, pods, named)]


def _written(*items: Json) -> list[Step]:
    return [Step("write", item) for item in items]


def _under_limits(scale: Scale, **labels: str) -> list[Json]:
    made = [_move_service(f"under-{n}", scale.under[0]) for n in range(scale.services)]
    return [entry | {"metadata": entry["metadata"] | {"labels": labels}} for entry in made]


def _under_limits_slices(scale: Scale) -> list[Json]:
    return [entry for n in range(scale.services) for entry in _move_slices(f"under-{n}", scale.under)]


def _affinity_of_one(scale: Scale) -> list[list[Step]]:
    service = _move_service("affine", scale.largest[0], **_AFFINITY)
    return [_written(service, *_move_slices("affine", scale.largest))]


def _affinity_turned_on(scale: Scale) -> list[list[Step]]:
    """Ten Services without affinity get it at once."""
    plain = [_move_service(f"sticky-{n}", scale.under[0]) for n in range(10)]
    slices = [entry for n in range(10) for entry in _move_slices(f"sticky-{n}", scale.under)]
    sticky = [entry | {"spec": entry["spec"] | _AFFINITY} for entry in plain]
    return [_written(*plain, *slices), _written(*sticky)]


def _commas(scale: Scale) -> list[list[Step]]:
    """Lists of Services and EndpointSlices have more commas than any honest ones."""
    text = "," * scale.text
    services = [_move_service(f"commas-{n}", 1, externalName=text) for n in range(4)]
    slices = []
    for n in range(3):
        (one,) = _move_slices(f"commas-{n}", (1, 1), targetRef={"kind": "Pod", "fieldPath": text})
        slices.append(one)
    return [_written(*services), _written(*slices)]


def _long_texts(scale: Scale) -> list[list[Step]]:
    """One character outside the basic plane makes Python keep four bytes for each."""
    text = "x" * scale.text + "\U0001f600"
    fields: Json = {"zone": {"zone": text}, "name": {"targetRef": {"kind": "Pod", "name": text}}}
    return [
        _written(
            *(entry for n in range(scale.services) for entry in _move_slices(f"{kind}-{n}", (1, 1), **field))
        )
        for kind, field in fields.items()
    ]


def _rapid_updates(scale: Scale) -> list[list[Step]]:
    """One large slice changes many times during a long sync."""
    updates = [
        _move_slices("rapid", (1, 1), zone=f"{n}".ljust(scale.text, "x"))[0]
        for n in range(8 * scale.services)
    ]
    services = _under_limits(scale)
    return [_written(*_under_limits_slices(scale), *services, _move_service("rapid", 1), *updates)]


def _ports_without_endpoints(scale: Scale) -> list[list[Step]]:
    services = [_move_service(f"unserved-{n}", scale.unserved) for n in range(4)]
    return [_written(*services), [Step("delete", entry) for entry in services]]


def _ports_at_node_address(scale: Scale) -> list[list[Step]]:
    """The address of node ports is an external IP with many ports, some of them of two Services."""
    address = {"externalIPs": [NODE_IP[Family.IPV4]]}
    services = [_move_service("wide", scale.at_node, **address), _move_service("same", 300, **address)]
    slices = [*_move_slices("wide", (scale.at_node, 1)), *_move_slices("same", (300, 1))]
    return [_written(*services, *slices), [Step("delete", entry) for entry in services]]


def _proxy_name_toggled(scale: Scale) -> list[list[Step]]:
    """Services just under the limit leave the proxy and return, all at once."""
    plain, labelled = _under_limits(scale), _under_limits(scale, **{_PROXY_NAME: "other"})
    return [_written(*plain, *_under_limits_slices(scale)), *([_written(*labelled), _written(*plain)] * 2)]


def _sums_under_limits(scale: Scale) -> list[list[Step]]:
    """Each Service is small enough for the ordinary sync, and together they are the largest; then all go."""
    services = _under_limits(scale)
    return [_written(*_under_limits_slices(scale), *services), [Step("delete", entry) for entry in services]]


def _sums_over_namespaces(scale: Scale) -> list[list[Step]]:
    """The same, each Service in a namespace of its own."""
    moved = [
        entry | {"metadata": entry["metadata"] | {"namespace": f"{_MOVES}-{n}"}}
        for items in (_under_limits_slices(scale), _under_limits(scale))
        for n, entry in enumerate(items)
    ]
    return [_written(*moved), [Step("delete", entry) for entry in moved if entry["kind"] == "Service"]]


# What a tenant may do on purpose, by name: batches of steps for a scale.
MOVES: dict[str, Callable[[Scale], list[list[Step]]]] = {
    "affinity": _affinity_of_one,
    "affinity-turned-on": _affinity_turned_on,
    "commas": _commas,
    "long-texts": _long_texts,
    "ports-at-node-address": _ports_at_node_address,
    "ports-without-endpoints": _ports_without_endpoints,
    "proxy-name-toggled": _proxy_name_toggled,
    "rapid-updates": _rapid_updates,
    "sums-over-namespaces": _sums_over_namespaces,
    "sums-under-limits": _sums_under_limits,
}


def _addresses(scale: Scale) -> st.SearchStrategy[list[str]]:
    """Addresses of external IPs: nested, in runs, those of the victim and of the node, and odd ones."""
    known = [*CLUSTER_IP.values(), *EXTERNAL_IP.values(), *BALANCER_IP.values(), *NODE_IP.values()]
    known += [pod(family, 1) for family in Family]
    near = st.sampled_from([*known, "2001:db8::", "203.0.113.9"])
    nested = st.builds(
        lambda to, step, copies, first, stride: nested_addresses(to, step, copies)[first::stride],
        *(near, st.sampled_from([1, 2, 4]), _up_to(scale.copies)),
        *(st.integers(0, 5), st.integers(1, 3)),
    )
    run = st.builds(
        lambda to, count: [str(ip_address(to) + n) for n in range(count)], near, _up_to(scale.list)
    )
    single = st.lists(st.sampled_from([*known, *_ODD]), max_size=4)
    parts = st.lists(st.one_of(nested, nested, run, single, st.just(known)), max_size=3)
    return parts.map(lambda lists: list(dict.fromkeys(address for part in lists for address in part)))


def _ports(scale: Scale) -> st.SearchStrategy[list[Json]]:
    """Ports like the victim's, many of them, equal numbers over protocols, and names of full length."""

    def many(count: int, protocols: list[str], long: bool, node_port: int) -> list[Json]:
        ports: list[Json] = []
        for n in range(count):
            for protocol in protocols:
                name = f"{protocol.lower()}-{n}"
                made: Json = {
                    "name": name.rjust(63, "y") if long else name,
                    "port": 53 + n,
                    "protocol": protocol,
                }
                ports.append(made | ({"nodePort": node_port + n} if node_port else {}))
        return ports

    like_victim = [
        {"name": name, "port": port, "protocol": protocol}
        for name, (port, protocol, _, _) in VICTIM_PORTS.items()
    ]
    protocols = st.lists(st.sampled_from(["TCP", "UDP", "SCTP"]), min_size=1, max_size=3, unique=True)
    node_ports = st.sampled_from([0, 0, 30000, 30905, 31000])
    return st.one_of(
        st.just(like_victim),
        st.just(like_victim),
        st.just([{"name": "", "port": 30909}]),
        st.just([{"name": "", "port": 8080}]),
        st.builds(many, _up_to(scale.ports), protocols, st.booleans(), node_ports),
    )


def _ranges(scale: Scale) -> st.SearchStrategy[list[str]]:
    lists = _up_to(scale.list).map(lambda count: [f"100.64.{n >> 8}.{n & 255}/32" for n in range(count)])
    return st.one_of(
        st.just([]),
        st.lists(
            st.sampled_from(["0.0.0.0/0", "::/0", "10.0.0.0/8", "fd00::/8", *SOURCES.values()]), max_size=3
        ),
        lists,
    )


def _services(scale: Scale, slot: tuple[str, str]) -> st.SearchStrategy[Json]:
    def build(
        kind: str,
        families: list[str],
        addresses: list[str],
        ports: list[Json],
        ranges: list[str],
        policies: tuple[str, str],
        affinity: int,
        ingress: list[str],
    ) -> Json:
        spec: Json = {
            "type": kind,
            "ipFamilies": families,
            "ipFamilyPolicy": "SingleStack" if len(families) == 1 else "RequireDualStack",
            "externalIPs": addresses,
            "ports": ports,
            "internalTrafficPolicy": policies[0],
        }
        if kind != "ClusterIP":
            spec["externalTrafficPolicy"] = policies[1]
        if affinity:
            spec |= {
                "sessionAffinity": "ClientIP",
                "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": affinity}},
            }
        made = _service(slot, spec)
        if kind == "LoadBalancer":
            spec["loadBalancerSourceRanges"] = ranges
            made["status"] = {"loadBalancer": {"ingress": [{"ip": ip} for ip in ingress]}}
        return made

    policy = st.sampled_from(["Cluster", "Local"])
    return st.builds(
        build,
        kind=st.sampled_from(["ClusterIP", "NodePort", "LoadBalancer"]),
        families=st.sampled_from([["IPv4"], ["IPv6"], ["IPv4", "IPv6"]]),
        addresses=_addresses(scale),
        ports=_ports(scale),
        ranges=_ranges(scale),
        policies=st.tuples(policy, policy),
        affinity=st.sampled_from([0, 0, 1, 86400]),
        # A cloud's controller would not give the tenant an address of the victim.
        ingress=st.lists(st.sampled_from(["198.51.100.77", "2001:db8:51::77", "198.51.100.78"]), max_size=2),
    )


def _slices(
    scale: Scale, slot: tuple[str, str], ports: list[Json] | None = None
) -> st.SearchStrategy[list[Json]]:
    """Slices of one Service with equal or different endpoints in all states, some of them the victim's pods.

    They have endpoints for `ports` if given, else all for the same port.
    """
    alike = [{"name": name, "port": 8080} for name in ("", *VICTIM_PORTS)]
    named = (
        alike
        if ports is None
        else [
            {"name": entry["name"], "port": 8080, "protocol": entry.get("protocol", "TCP")} for entry in ports
        ]
    )
    state = st.fixed_dictionaries(
        {}, optional={"ready": st.booleans(), "serving": st.booleans(), "terminating": st.booleans()}
    )

    def build(
        families: list[Family],
        count: int,
        slices: int,
        equal: bool,
        first: int,
        states: list[Json],
        to_victim: bool,
    ) -> list[Json]:
        made = []
        for family, number in itertools.product(families, range(slices)):
            base = ip_address("10.244.9.1" if family is Family.IPV4 else "fd00:10:244:9::1") + first
            start = base if equal else base + number * count
            endpoints = [
                {
                    "addresses": [str(start + n)],
                    "conditions": states[n % len(states)],
                    "nodeName": ("node1", "node2")[n % 2],
                }
                for n in range(count)
            ]
            item = _slice(slot, f"{slot[1][:40]}-{family.value.lower()}-{number}", family, endpoints, named)
            if to_victim:
                # The name of the victim counts in the victim's namespace only.
                namespace = "aaa" if slot[0] == "default" else slot[0]
                item["metadata"] |= {
                    "namespace": namespace,
                    "labels": {"kubernetes.io/service-name": "victim"},
                }
            made.append(item)
        return made

    return st.builds(
        build,
        families=st.sampled_from([list(Family), list(Family), [Family.IPV4], [Family.IPV6]]),
        count=_up_to(scale.endpoints),
        slices=_up_to(scale.slices),
        equal=st.booleans(),
        first=st.sampled_from([0, 300]),
        # Most often, all are ready.
        states=st.one_of(st.just([{}]), st.just([{}]), st.lists(state, min_size=1, max_size=3)),
        to_victim=st.sampled_from([False, False, False, True]),
    )


def _up_to(most: int) -> st.SearchStrategy[int]:
    """Counts, often the greatest: hypothesis prefers small numbers."""
    return st.one_of(st.integers(0, most), st.integers(most // 2, most), st.just(most))


def _service(slot: tuple[str, str], spec: Json) -> Json:
    namespace, name = slot
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }


def _slice(
    slot: tuple[str, str], name: str, family: Family, endpoints: list[Json], ports: list[Json]
) -> Json:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": slot[0],
            "labels": {"kubernetes.io/service-name": slot[1]},
        },
        "addressType": family.value,
        "endpoints": endpoints,
        "ports": ports,
    }
