"""API objects with invalid or unusual values in random fields."""

import copy
import json
from typing import Any, cast

from hypothesis import strategies as st

from pykubeproxy.objects import Kind

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

WHOLE: dict[Kind, dict[str, Json]] = {
    Kind.SERVICE: {
        "metadata": {
            "name": "web",
            "namespace": "ns",
            "labels": {"a": "b"},
            "annotations": {"c": "d"},
        },
        "spec": {
            "type": "LoadBalancer",
            "clusterIP": "10.96.0.10",
            "clusterIPs": ["10.96.0.10", "fd00:96::10"],
            "ports": [{"name": "http", "protocol": "TCP", "port": 80, "nodePort": 30080, "targetPort": 8080}],
            "externalIPs": ["192.0.2.1", "2001:db8::1"],
            "loadBalancerSourceRanges": ["203.0.113.0/24", "2001:db8:1::/48"],
            "internalTrafficPolicy": "Cluster",
            "externalTrafficPolicy": "Local",
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}},
            "healthCheckNodePort": 32000,
        },
        "status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.1", "ipMode": "VIP"}]}},
    },
    Kind.ENDPOINT_SLICE: {
        "metadata": {
            "name": "web-1",
            "namespace": "ns",
            "labels": {"kubernetes.io/service-name": "web"},
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00Z"},
        },
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": ["10.244.1.5"],
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "nodeName": "node1",
                "zone": "zone-a",
                "hints": {"forZones": [{"name": "zone-a"}], "forNodes": [{"name": "node1"}]},
                "targetRef": {"kind": "Pod", "name": "web-1"},
            }
        ],
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
    },
    Kind.NODE: {
        "metadata": {"name": "node1", "labels": {"topology.kubernetes.io/zone": "zone-a"}},
        "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24"], "taints": [{"key": "k"}]},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.168.99.10"}]},
    },
}

SYNTAX = (
    '"; -j DROP',
    'x" -j DROP #',
    "a\nCOMMIT\n*filter\n-A INPUT -j DROP",
    "$(reboot)",
    "`reboot`",
    "-j",
    "! -s",
    "a b",
    "a\tb",
    "\x00",
    "\u2028",
    "é",
    "A",
    "..",
    "-a",
    "a/b",
    "a:b",
    "x" * 300,
    "fe80::%a\n-A INPUT -j DROP\n/64",
    "fe80::1%eth0",
    "1.2.3.4\n",
    " 1.2.3.4",
    "1.2.3.4/33",
    "010.1.2.3",
    "1.2.3",
    "0x7f.1",
    "::ffff:1.2.3.4",
    "1::2::3",
    "٣.1.2.3",
    "",
    "0",
)
numbers = st.one_of(
    st.sampled_from([-1, 0, 1, 65535, 65536, 2**31, 2**63, 2**64, 10**400]),
    st.integers(),
    st.floats(allow_nan=False),
)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.sampled_from(SYNTAX), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def paths(value: Json, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the paths of all values."""
    found = [path] if path else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, it in inner:
        found += paths(it, (*path, key))
    return found


def value_at(document: Json, path: tuple[str | int, ...]) -> Json:
    """Return the value at a path."""
    for step in path:
        document = cast("Any", document)[step]
    return document


def put(document: Json, path: tuple[str | int, ...], value: object) -> None:
    """Replace the value at a path."""
    cast("Any", value_at(document, path[:-1]))[path[-1]] = value


@st.composite
def corrupted(draw: st.DrawFn, kind: Kind) -> bytes:
    """Draw JSON of an object with up to three arbitrary values."""
    document = copy.deepcopy(WHOLE[kind])
    for path in draw(st.lists(st.sampled_from(paths(document)), min_size=1, max_size=3)):
        try:
            put(document, path, draw(anything))
        except (TypeError, KeyError, IndexError):
            continue
    return json.dumps(document).encode("utf-8", "surrogatepass")


_ADDRESSES = (
    "0.0.0.0",
    "0.0.0.1",
    "10.96.0.10",
    "010.096.0.10",
    "127.0.0.1",
    "127.1.2.3",
    "169.254.169.254",
    "192.168.99.10",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::10.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "fe80::1",
    "fe8::1",
    "ff02::1",
    "FD00:96::0:10",
    "2001:db8:0:0:1::",
)
_NETWORKS = tuple(
    f"{address}/{length}"
    for address in _ADDRESSES
    for length in (0, 1, 8, 32, 128)
    if ":" in address or length < 33
)
_NAMES = ("a", "0", "x" * 63, "a-b", "1" * 63)
# Legal or nearly legal values by field.
_ODD: dict[Kind, dict[tuple[str | int, ...], tuple[Json, ...]]] = {
    Kind.SERVICE: {
        ("metadata", "name"): _NAMES,
        ("metadata", "namespace"): _NAMES,
        ("spec", "type"): ("ClusterIP", "NodePort", "LoadBalancer", "Sneaky", "-j"),
        ("spec", "clusterIPs", 0): _ADDRESSES,
        ("spec", "clusterIPs", 1): _ADDRESSES,
        ("spec", "externalIPs", 0): _ADDRESSES,
        ("spec", "externalIPs", 1): _ADDRESSES,
        ("spec", "loadBalancerSourceRanges", 0): _NETWORKS,
        ("spec", "loadBalancerSourceRanges", 1): _NETWORKS,
        ("status", "loadBalancer", "ingress", 0, "ip"): _ADDRESSES,
        ("spec", "ports", 0, "name"): (*_NAMES, "http", ""),
        ("spec", "ports", 0, "port"): (1, 65535),
        ("spec", "ports", 0, "nodePort"): (0, 1, 22, 10256, 65535),
        ("spec", "ports", 0, "protocol"): ("UDP", "SCTP", None),
        ("spec", "sessionAffinityConfig", "clientIP", "timeoutSeconds"): (1, 86400),
        ("spec", "externalTrafficPolicy"): ("Cluster", "local", None),
        ("spec", "internalTrafficPolicy"): ("Local", "-j DROP"),
        ("spec", "healthCheckNodePort"): (0, 1, 22, 65535),
    },
    Kind.ENDPOINT_SLICE: {
        ("addressType",): ("IPv6", "FQDN"),
        ("endpoints", 0, "addresses", 0): _ADDRESSES,
        ("endpoints", 0, "nodeName"): ("", "node1 ", "-j"),
        ("endpoints", 0, "conditions", "ready"): (None, False),
        ("ports", 0, "port"): (1, 65535, 0, None),
        ("ports", 0, "name"): (None, "", "http"),
    },
}


@st.composite
def odd(draw: st.DrawFn, kind: Kind) -> bytes:
    """Draw JSON of an object with up to four unusual values or pieces of syntax."""
    document = copy.deepcopy(WHOLE[kind])
    places = _ODD[kind]
    for path in draw(st.lists(st.sampled_from(list(places)), max_size=4, unique=True)):
        put(document, path, draw(st.one_of(st.sampled_from(places[path]), st.sampled_from(SYNTAX))))
    return json.dumps(document).encode()
