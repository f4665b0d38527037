"""Documents are decoded to objects and warnings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.config import yaml
from pykubeproxy.objects import EndpointSlice, Key, Service
from pykubeproxy.sources import documents
from pykubeproxy.sources.documents import InvalidManifest, read

SERVICE = """\
apiVersion: v1
kind: Service
metadata:
  name: web
  namespace: shop
  creationTimestamp: 2026-11-20T23:41:20Z
  annotations: {when: 2026-11-20, enabled: "on"}
spec:
  clusterIP: 10.96.0.5
  ports: [{port: 80}]
"""


def test_service_from_yaml() -> None:
    """Timestamps in odd places do no harm."""
    contents = read(SERVICE.encode(), "web.yaml")
    assert [it.object for it in contents.objects] == [
        Service(
            namespace="shop",
            name="web",
            cluster_ips=("10.96.0.5",),
            ports=contents.objects[0].object.ports,
            created=1_795_218_080.0,
        )
    ]
    assert not contents.warnings


def test_lists_hold_objects() -> None:
    """Items of a List name their kind; those of a ServiceList, as the API writes it, need not."""
    text = b"""
kind: List
apiVersion: v1
items:
- {kind: Node, metadata: {name: n1}}
- {kind: ServiceList, items: [{metadata: {name: deep}, spec: {}}]}
---
kind: ServiceList
items:
- {metadata: {name: a}, spec: {}}
---
{kind: EndpointSliceList, items: null}
"""
    contents = read(text, "f.yaml")
    assert [it.object.key.name for it in contents.objects] == ["n1", "deep", "a"]
    assert not contents.warnings


@pytest.mark.parametrize("name", ["f.json", "f.yaml", "<stdin>"])
def test_json_in_every_arrangement(name: str) -> None:
    """One object, or concatenated objects, as `kubectl get -o json` twice prints them."""
    one = b'{"kind": "Node",\n "metadata": {"name": "%s"}}'
    assert [it.object.key.name for it in read(one % b"a", name).objects] == ["a"]
    contents = read(one % b"a" + b"\n" + one % b"b", name)
    assert [it.object.key.name for it in contents.objects] == ["a", "b"]
    assert contents.objects[1].location == f"{name}:3"


def test_json_between_the_separators_of_yaml() -> None:
    """A YAML document may be JSON."""
    contents = read(
        b'{"kind": "Node",\n "metadata": {"name": "a"}}\n---\nkind: Node\nmetadata: {name: b}', "f.yaml"
    )
    assert [(it.object.key.name, it.location) for it in contents.objects] == [
        ("a", "f.yaml:1"),
        ("b", "f.yaml:4"),
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("hello", "f.yaml:1: skipped: a string, not an object"),
        ("[1]", "f.yaml:1: skipped: a list, not an object"),
        ("12", "f.yaml:1: skipped: a number, not an object"),
        ("no_kind: 1", "f.yaml:1: skipped: kind is missing"),
        ("kind: 5", "f.yaml:1: skipped: kind is 5"),
        ("{kind: List, items: {}}", "f.yaml:1: skipped: items is not a list"),
        ("{kind: List, items: [{}]}", "f.yaml:1 items[0]: skipped: kind is missing"),
        ("{kind: ServiceList, items: [7]}", "f.yaml:1 items[0]: skipped: a number, not an object"),
        (
            "{kind: EndpointSlice, metadata: {name: s}}",
            "f.yaml:1: EndpointSlice s is skipped: Object missing required field `addressType`",
        ),
        (
            "{kind: EndpointSlice, apiVersion: discovery.k8s.io/v1beta1}",
            "f.yaml:1: EndpointSlice skipped: apiVersion is 'discovery.k8s.io/v1beta1', not 'discovery.k8s.io/v1'",
        ),
    ],
)
def test_one_bad_document_does_not_stop_the_others(text: str, complaint: str) -> None:
    """The warning names file and line; the next document is read."""
    contents = read(f"{text}\n---\n{SERVICE}".encode(), "f.yaml")
    assert list(contents.warnings) == [complaint]
    assert [it.object.key for it in contents.objects] == [Key("shop", "web")]


def test_kinds_of_no_interest_are_skipped() -> None:
    """Other kinds, and a Service of another API group, give no objects and no warning."""
    text = b"kind: Pod\n---\n{kind: Service, apiVersion: serving.knative.dev/v1}\n---\nnull\n---\n"
    contents = read(text, "f.yaml")
    assert not contents.objects
    assert not contents.warnings
    assert len(contents.other_kinds) == 2


def test_services_of_other_proxies_are_there() -> None:
    """Headless Services and those of other proxies are read."""
    text = b"""
{kind: Service, metadata: {name: a, labels: {service.kubernetes.io/service-proxy-name: x}}, spec: {}}
---
{kind: Service, metadata: {name: b}, spec: {clusterIP: None}}
---
{kind: EndpointSlice, addressType: IPv4, metadata: {name: c, labels: {service.kubernetes.io/headless: ""}}}
"""
    one, two, three = (it.object for it in read(text, "f.yaml").objects)
    assert isinstance(one, Service)
    assert one.proxy_name == "x"
    assert isinstance(two, Service)
    assert two.headless
    assert isinstance(three, EndpointSlice)
    assert three.headless


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("f.yaml", b"a: b\n---\nc: [1\n", "f.yaml:4: invalid YAML: "),
        ("f.yaml", b"a: b\n\tc: d", "f.yaml:2: invalid YAML: found a tab character"),
        (
            "f.yaml",
            b"a: !Ref b",
            "f.yaml:1: invalid YAML: could not determine a constructor for the tag '!Ref'",
        ),
        ("f.yaml", b"a: b\n---\n~: 1", "f.yaml:3: invalid YAML: a key is not a string"),
        ("f.yaml", b"x: &a [*a]", "f.yaml:1: invalid YAML: anchor a is undefined or contains itself"),
        ("f.json", b'{"kind": "Node",\n "metadata"}', "f.json:2: invalid JSON: "),
        ("f.json", b'{"kind": "Node"} x', "f.json:1: invalid JSON: "),
        ("f.json", b'{"a": ' + b"[" * 99999, "f.json:1: invalid JSON: "),
        ("f.json", b'{"kind": "Node"}\n{"a": NaN}', "f.json:2: invalid JSON: "),
        ("f.json", b'{"kind": "\\ud800"}', "f.json:1: invalid JSON: "),
    ],
)
def test_text_that_does_not_parse(name: str, text: bytes, message: str) -> None:
    """The error is one line with file, line and reason."""
    with pytest.raises(InvalidManifest) as caught:
        read(text, name)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_more_values_than_objects_need_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of three characters takes a hundred times its size in memory."""
    monkeypatch.setattr(documents, "_MOST_COMMAS", 3)
    assert read(b'{"kind":"List","items":[[],[],[]]}', "f.json").warnings
    with pytest.raises(InvalidManifest, match=r"^f\.json: more than 3 values; give fewer objects$"):
        read(b'{"kind":"List","items":[[],[],[],[]]}', "f.json")
    monkeypatch.setattr(yaml, "_MAX_VALUES", 20)
    read(b"- a\n" * 10, "f.yaml")
    with pytest.raises(
        InvalidManifest, match=r"^f\.yaml:19: invalid YAML: it has too many values; use JSON$"
    ):
        read(b"- a\n" * 20, "f.yaml")


def test_a_file_of_faults_is_an_error() -> None:
    """Each warning takes memory and a line of output."""
    assert len(read(b'{"kind":"List","items":[%s1]}' % (b"1," * 999), "f.json").warnings) == 1000
    with pytest.raises(
        InvalidManifest, match=r"^f\.json:1 items\[1000\]: skipped: .*; and 1,000 faults before it$"
    ):
        read(b'{"kind":"List","items":[%s1]}' % (b"1," * 1000), "f.json")


@given(
    st.one_of(
        st.binary(max_size=60), st.text("[]{}:-!&*#|>'\",\n \tkindService0.~", max_size=60).map(str.encode)
    )
)
def test_any_bytes_are_read_or_refused(text: bytes) -> None:
    """Any input gives a ManifestFile or InvalidManifest."""
    for name in ("f.yaml", "f.json"):
        try:
            read(text, name)
        except InvalidManifest as error:
            assert "\n" not in str(error)
