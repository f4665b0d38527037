"""An invalid value costs the entry it is part of; a broken object is rejected with one clear line."""

import copy
import itertools
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubeproxy.objects import (
    Endpoint,
    EndpointSlice,
    Kind,
    Node,
    Port,
    Protocol,
    Service,
    Undecodable,
    decode,
    rejection_warning,
)
from tests.invalid_objects import WHOLE, corrupted, paths, put, value_at


def rejection(kind: Kind, raw: bytes) -> str:
    """Return the line that says why an object is skipped."""
    with pytest.raises(Undecodable) as caught:
        decode(kind, raw)
    line = str(caught.value)
    assert line.isprintable()
    assert len(line) < 700
    return line


def spec(**fields: object) -> bytes:
    """Return a Service with these fields in its spec."""
    whole = json.loads(json.dumps(WHOLE[Kind.SERVICE]))
    whole["spec"].update(fields)
    return json.dumps(whole).encode()


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(Kind).flatmap(lambda kind: st.tuples(st.just(kind), corrupted(kind))))
def test_corrupt_object_is_decoded_or_rejected(case: tuple[Kind, bytes]) -> None:
    """decode raises only Undecodable with a single line; decoded names have no control characters."""
    kind, raw = case
    try:
        decoded = decode(kind, raw)
    except Undecodable as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 700
    else:
        assert decoded.key.name.isascii()


@pytest.mark.parametrize(("uid", "kept"), [("0c5d", "0c5d"), ("x" * 65, ""), (None, "")])
def test_a_service_keeps_a_short_uid(uid: str | None, kept: str) -> None:
    whole = json.loads(spec())
    whole["metadata"]["uid"] = uid
    decoded = decode(Kind.SERVICE, json.dumps(whole).encode())
    assert isinstance(decoded, Service)
    assert decoded.uid == kept


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from(Kind), raw=st.one_of(st.binary(), st.text().map(str.encode)))
def test_noise_is_rejected(kind: Kind, raw: bytes) -> None:
    with pytest.raises(Undecodable):
        decode(kind, raw)


def test_service_with_too_many_rules_is_rejected() -> None:
    """The API server accepts ports, addresses and source ranges that multiply to more rules than a node can hold."""
    ports = [{"name": f"p{number}", "port": number} for number in range(1, 1001)]
    addresses = [f"192.0.2.{number}" for number in range(90)]
    ranges = [f"203.0.{number}.0/24" for number in range(8)]
    most = {"ports": ports, "externalIPs": addresses, "loadBalancerSourceRanges": ranges}
    assert len(decode(Kind.SERVICE, spec(**most)).ports) == 1000  # type: ignore[union-attr]
    line = rejection(Kind.SERVICE, spec(**{**most, "externalIPs": [*addresses, "192.0.2.90"]}))
    assert line.endswith("1000 ports for 92 addresses and 8 source ranges are more than 100000 rules")


HTTP = {"name": "http", "port": 80}


@pytest.mark.parametrize(
    ("fields", "attribute", "left", "warning"),
    [
        (
            {"ports": [{"port": 0}, HTTP]},
            "ports",
            (Port("http", Protocol.TCP, 80),),
            "spec.ports[0].port is 0, not a port from 1 to 65535: the port is skipped",
        ),
        (
            {"ports": [HTTP, {"port": 81, "nodePort": 65536}]},
            "ports",
            (Port("http", Protocol.TCP, 80),),
            "spec.ports[1].nodePort is 65536, not a port from 1 to 65535: the port is skipped",
        ),
        (
            {"ports": [{"port": 80, "protocol": "QUIC"}]},
            "ports",
            (),
            "spec.ports[0].protocol is 'QUIC', not TCP, UDP or SCTP: the port is skipped",
        ),
        (
            {"ports": [{"port": 80, "name": 'a"b'}]},
            "ports",
            (),
            "spec.ports[0].name is 'a\"b', not a DNS label: the port is skipped",
        ),
        (
            {"clusterIPs": ["10.0.0.256", "fd00:96::10"]},
            "cluster_ips",
            ("fd00:96::10",),
            "spec.clusterIPs[0] is '10.0.0.256', not an IP address: it is skipped",
        ),
        (
            {"externalIPs": ["", "1.2.3.4\n", "192.0.2.1", "a.example"]},
            "external_ips",
            ("192.0.2.1",),
            "spec.externalIPs[0] is '', not an IP address: it is skipped, and 2 more",
        ),
        (
            {"externalIPs": ["192.0.2.1", "fe80::1%eth0"]},
            "external_ips",
            ("192.0.2.1",),
            "spec.externalIPs[1] is 'fe80::1%eth0', with a zone, which rules cannot match: it is skipped",
        ),
        (
            {"loadBalancerSourceRanges": ["10.0.0.0", "203.0.113.0/24"]},
            "source_ranges",
            ("203.0.113.0/24",),
            "spec.loadBalancerSourceRanges[0] is '10.0.0.0', not a network such as 10.0.0.0/8: it is skipped",
        ),
        (
            {"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 0}}},
            "affinity_seconds",
            10800,
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds is 0, not 1 to 86400: it is skipped",
        ),
        (
            {"healthCheckNodePort": -1},
            "health_check_node_port",
            0,
            "spec.healthCheckNodePort is -1, not a port from 1 to 65535: it is skipped",
        ),
    ],
)
def test_an_invalid_entry_costs_only_itself(
    fields: dict[str, object], attribute: str, left: object, warning: str
) -> None:
    """The Service keeps everything else, and one line names field and value."""
    whole, it = decode(Kind.SERVICE, spec()), decode(Kind.SERVICE, spec(**fields))
    assert isinstance(it, Service)
    assert getattr(it, attribute) == left
    assert rejection_warning(it) == f"Service ns/web: {warning}"
    others = [name for name in it.__struct_fields__ if name not in (attribute, "rejected")]
    assert [getattr(it, name) for name in others] == [getattr(whole, name) for name in others]


@pytest.mark.parametrize(
    ("text", "seconds"), [("2026-01-01T00:00:05Z", 1767225605.0), ("", 0.0), ("yesterday", 0.0), (None, 0.0)]
)
def test_an_invalid_creation_time_counts_as_unknown(text: str | None, seconds: float) -> None:
    whole = WHOLE[Kind.SERVICE]
    metadata = whole["metadata"]
    assert isinstance(metadata, dict)
    metadata = {**metadata, "creationTimestamp": text}
    it = decode(Kind.SERVICE, json.dumps({**whole, "metadata": metadata}).encode())
    assert isinstance(it, Service)
    assert it.created == seconds


def test_an_invalid_ingress_address_costs_only_itself() -> None:
    """One of ipMode Proxy, or with a host name only, is none."""
    ingress = [
        {"ip": "lb.example"},
        {"ip": "198.51.100.2"},
        {"hostname": "x"},
        {"ip": "y", "ipMode": "Proxy"},
    ]
    status = {"loadBalancer": {"ingress": ingress}}
    it = decode(Kind.SERVICE, json.dumps({**WHOLE[Kind.SERVICE], "status": status}).encode())
    assert isinstance(it, Service)
    assert it.load_balancer_ips == ("198.51.100.2",)
    assert [str(rejected) for rejected in it.rejected] == [
        "status.loadBalancer.ingress[0].ip is 'lb.example', not an IP address: it is skipped"
    ]


def test_an_invalid_node_address_costs_only_itself() -> None:
    """The API server accepts any text there."""
    addresses = [
        {"type": "InternalIP", "address": ""},
        {"type": "InternalIP", "address": "fe80::1%eth0"},
        {"type": "Hostname", "address": "node1"},
        {"type": "ExternalIP", "address": "ec2.example.com"},
        {"type": "ExternalIP", "address": "192.0.2.7"},
        {"type": "InternalIP", "address": "192.168.99.10"},
    ]
    whole = {
        **WHOLE[Kind.NODE],
        "spec": {"podCIDRs": ["10.244.1.0", "fd00:10:244:1::/64"]},
        "status": {"addresses": addresses},
    }
    it = decode(Kind.NODE, json.dumps(whole).encode())
    assert isinstance(it, Node)
    assert (it.addresses, it.zone) == (("192.168.99.10", "192.0.2.7"), "zone-a")
    assert it.pod_cidrs == ("fd00:10:244:1::/64",)
    warning = "Node node1: status.addresses[0].address is '', not an IP address: it is skipped, and 3 more"
    assert rejection_warning(it) == warning


def test_an_invalid_endpoint_or_port_costs_only_itself() -> None:
    """As with other endpoints and ports of the slice."""
    endpoints = [{"addresses": ["10.244.1"]}, {"addresses": ["10.244.1.6"]}]
    ports = [{"name": "a b", "port": 1}, {"name": "x", "port": 70000}, {"name": "http", "port": 8080}]
    whole = {**WHOLE[Kind.ENDPOINT_SLICE], "endpoints": endpoints, "ports": ports}
    it = decode(Kind.ENDPOINT_SLICE, json.dumps(whole).encode())
    assert isinstance(it, EndpointSlice)
    assert [endpoint.address for endpoint in it.endpoints] == ["10.244.1.6"]
    assert [port.name for port in it.ports] == ["http"]
    assert [str(rejected) for rejected in it.rejected] == [
        "endpoints[0].addresses[0] is '10.244.1', not an IP address: the endpoint is skipped",
        "ports[0].name is 'a b', not a DNS label: the port is skipped",
        "ports[1].port is 70000, not a port from 1 to 65535: the port is skipped",
    ]


@pytest.mark.parametrize(
    "range_", ["fe80::%a\n-A KUBE-SERVICES -j DROP\n/64", 'fe80::%" -j ACCEPT/64', "fe80::%eth0/64"]
)
def test_zone_cannot_inject_text_into_a_network(range_: str) -> None:
    """Python's ipaddress keeps any text after "%"; it must not reach a rule."""
    it = decode(Kind.SERVICE, spec(loadBalancerSourceRanges=[range_]))
    assert isinstance(it, Service)
    assert it.source_ranges == ()
    assert "not a network" in rejection_warning(it)
    assert rejection_warning(it).isprintable()


@pytest.mark.parametrize("text", ["x" * 10_000_000, "\n" * 1_000_000])
@pytest.mark.parametrize("field", ["name", "namespace"])
def test_huge_value_is_shortened(field: str, text: str) -> None:
    raw = json.dumps({**WHOLE[Kind.SERVICE], "metadata": {"name": "a", field: text}}).encode()
    assert "not a DNS label" in rejection(Kind.SERVICE, raw)


def test_huge_entry_is_shortened() -> None:
    """Also in `explain`, which shows the value."""
    it = decode(Kind.SERVICE, spec(externalIPs=["x" * 1_000_000]))
    assert isinstance(it, Service)
    assert len(str(it.rejected[0].value)) < 200
    assert len(rejection_warning(it)) < 300


LABELS = {
    Kind.SERVICE: "service.kubernetes.io/service-proxy-name",
    Kind.ENDPOINT_SLICE: "service.kubernetes.io/headless",
    Kind.NODE: "kubernetes.io/os",
}


@pytest.mark.parametrize("kind", Kind)
def test_long_text_is_never_kept(kind: Kind) -> None:
    """Whichever field has it: one emoji makes each character take four bytes."""
    whole = copy.deepcopy(WHOLE[kind])
    whole["metadata"].setdefault("labels", {})[LABELS[kind]] = "x"  # type: ignore[index, union-attr, call-overload]
    texts = [path for path in paths(whole) if isinstance(value_at(whole, path), str)]
    assert len(texts) > 6
    for path, text in itertools.product(texts, ("x" * 100_000, "\N{CLOWN FACE}" + "x" * 100_000)):
        changed = copy.deepcopy(whole)
        put(changed, path, text)
        try:
            decoded = decode(kind, json.dumps(changed).encode())
        except Undecodable as error:
            assert len(str(error)) < 700
        else:
            assert len(msgspec.json.encode(decoded)) < 2000, path


@pytest.mark.parametrize("name", ["\N{CLOWN FACE}" * 300_000, "web-1, run: kubectl delete ns prod", "web\n1"])
def test_an_endpoint_with_an_impossible_optional_name_is_served(name: str) -> None:
    """The name counts as missing, so that no command prints it; a hint keeps its effect on other zones."""
    whole = copy.deepcopy(WHOLE[Kind.ENDPOINT_SLICE])
    endpoints = whole["endpoints"]
    assert isinstance(endpoints, list)
    (endpoint,) = endpoints
    assert isinstance(endpoint, dict)
    endpoint.update(
        nodeName=name,
        zone="z" * 64,
        targetRef={"name": name},
        hints={"forZones": [{"name": name}, {"name": "z" * 63}]},
    )
    decoded = decode(Kind.ENDPOINT_SLICE, json.dumps(whole).encode())
    assert isinstance(decoded, EndpointSlice)
    assert decoded.endpoints == (Endpoint("10.244.1.5", zone_hints=("?", "z" * 63)),)
    assert decoded.rejected == ()


def test_few_of_many_invalid_entries_are_kept() -> None:
    """The API server accepts any number of multicast addresses. The last one that is kept counts the others."""
    addresses = [f"225.0.{number // 250}.{number % 250}" for number in range(50_000)]
    it = decode(Kind.SERVICE, spec(externalIPs=addresses, loadBalancerSourceRanges=["x"]))
    assert isinstance(it, Service)
    assert [entry.field for entry in it.rejected] == [
        *(f"spec.externalIPs[{number}]" for number in range(100)),
        "spec.loadBalancerSourceRanges[0]",
    ]
    assert str(it.rejected[99]) == (
        "spec.externalIPs[99] is '225.0.0.99', a multicast address (49900 more entries are invalid): it is skipped"
    )


def test_addresses_that_are_not_served_are_not_kept() -> None:
    """Those of an ExternalName, and of a Service without ports."""
    addresses = [f"192.0.{number // 250}.{number % 250}" for number in range(60_000)]
    it = decode(Kind.SERVICE, spec(type="ExternalName", externalIPs=addresses))
    assert it == Service("ns", "web", "ExternalName")
    assert "more than 100000 rules" in rejection(Kind.SERVICE, spec(ports=[], externalIPs=addresses * 2))


def test_deep_nesting_is_rejected() -> None:
    """A hundred thousand levels in an unknown field."""
    deep = b"[" * 100_000 + b"]" * 100_000
    assert "nested too deeply" in rejection(Kind.SERVICE, b'{"metadata":{"name":"a"},"spec":{"x":%s}}' % deep)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"metadata":{"name":"a\xff"},"spec":{}}',
        b'{"metadata":{"name":"a\\ud800"},"spec":{}}',
        b'{"metadata":{"name":"a\\u0000"},"spec":{}}',
        b'{"metadata":{"name":"a"},"spec":{}} {}',
        b'{"metadata":{"name":"a"},"spec":null}',
        b'{"metadata":null,"spec":{}}',
        b'{"metadata":{"name":"a"},"spec":{"ports":[null]}}',
        b"\xef\xbb\xbf{}",
        b"null",
        b"",
    ],
)
def test_broken_json_and_text(raw: bytes) -> None:
    """Invalid UTF-8, lone surrogates, NUL, and null instead of an object are rejected."""
    rejection(Kind.SERVICE, raw)


def test_last_duplicate_key_wins() -> None:
    """As in Go."""
    decoded = decode(Kind.SERVICE, b'{"metadata":{"name":"a","name":"b"},"spec":{}}')
    assert decoded.key.name == "b"


def test_null_means_missing() -> None:
    """For every optional field."""
    whole = json.loads(json.dumps(WHOLE[Kind.SERVICE]))
    for field in whole["spec"]:
        decode(Kind.SERVICE, spec(**{field: None}))
    whole["status"] = None
    whole["metadata"].update(labels=None, annotations=None, namespace=None)
    assert decode(Kind.SERVICE, json.dumps(whole).encode()).key.namespace == "default"
