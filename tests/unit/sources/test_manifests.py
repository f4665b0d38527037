"""Documents are decoded to objects and warnings, and manifests read once, or again when they change."""

import os
import subprocess
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubeproxy.config import yaml
from pykubeproxy.objects import EndpointSlice, Key, Kind, Service
from pykubeproxy.sources import SourceError, manifests
from pykubeproxy.sources.manifests import InvalidManifest, ManifestWatch, load_manifests, read_manifest
from tests.fakes.follower import Follower
from tests.fakes.waiting import PATIENCE, eventually

Lines = list[MutableMapping[str, Any]]

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
    contents = read_manifest(SERVICE.encode(), "web.yaml")
    web = contents.objects[0].object
    assert isinstance(web, Service)
    assert [located.object for located in contents.objects] == [
        Service(
            namespace="shop",
            name="web",
            cluster_ips=("10.96.0.5",),
            ports=web.ports,
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
    contents = read_manifest(text, "f.yaml")
    assert [located.object.key.name for located in contents.objects] == ["n1", "deep", "a"]
    assert not contents.warnings


@pytest.mark.parametrize("name", ["f.json", "f.yaml", "<stdin>"])
def test_json_in_every_arrangement(name: str) -> None:
    """One object, or concatenated objects, as `kubectl get -o json` twice prints them."""
    one = b'{"kind": "Node",\n "metadata": {"name": "%s"}}'
    assert [located.object.key.name for located in read_manifest(one % b"a", name).objects] == ["a"]
    contents = read_manifest(one % b"a" + b"\n" + one % b"b", name)
    assert [located.object.key.name for located in contents.objects] == ["a", "b"]
    assert contents.objects[1].location == f"{name}:3"


def test_json_between_the_separators_of_yaml() -> None:
    """A YAML document may be JSON."""
    contents = read_manifest(
        b'{"kind": "Node",\n "metadata": {"name": "a"}}\n---\nkind: Node\nmetadata: {name: b}', "f.yaml"
    )
    assert [(located.object.key.name, located.location) for located in contents.objects] == [
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
    contents = read_manifest(f"{text}\n---\n{SERVICE}".encode(), "f.yaml")
    assert list(contents.warnings) == [complaint]
    assert [located.object.key for located in contents.objects] == [Key("shop", "web")]


def test_kinds_of_no_interest_are_skipped() -> None:
    """Other kinds, and a Service of another API group, give no objects and no warning."""
    text = b"kind: Pod\n---\n{kind: Service, apiVersion: serving.knative.dev/v1}\n---\nnull\n---\n"
    contents = read_manifest(text, "f.yaml")
    assert not contents.objects
    assert not contents.warnings


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
        read_manifest(text, name)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_more_values_than_objects_need_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of three characters takes a hundred times its size in memory."""
    monkeypatch.setattr(manifests, "_MOST_COMMAS", 3)
    assert read_manifest(b'{"kind":"List","items":[[],[],[]]}', "f.json").warnings
    with pytest.raises(InvalidManifest, match=r"^f\.json: more than 3 values; give fewer objects$"):
        read_manifest(b'{"kind":"List","items":[[],[],[],[]]}', "f.json")
    monkeypatch.setattr(yaml, "_MAX_VALUES", 20)
    read_manifest(b"- a\n" * 10, "f.yaml")
    with pytest.raises(
        InvalidManifest, match=r"^f\.yaml:19: invalid YAML: it has too many values; use JSON$"
    ):
        read_manifest(b"- a\n" * 20, "f.yaml")


def test_a_file_of_faults_is_an_error() -> None:
    """Each warning takes memory and a line of output."""
    assert len(read_manifest(b'{"kind":"List","items":[%s1]}' % (b"1," * 999), "f.json").warnings) == 1000
    with pytest.raises(
        InvalidManifest, match=r"^f\.json:1 items\[1000\]: skipped: .*; and 1,000 faults before it$"
    ):
        read_manifest(b'{"kind":"List","items":[%s1]}' % (b"1," * 1000), "f.json")


@given(
    st.one_of(
        st.binary(max_size=60), st.text("[]{}:-!&*#|>'\",\n \tkindService0.~", max_size=60).map(str.encode)
    )
)
def test_any_bytes_are_read_or_refused(text: bytes) -> None:
    """Any input gives a ManifestFile or InvalidManifest."""
    for name in ("f.yaml", "f.json"):
        try:
            read_manifest(text, name)
        except InvalidManifest as error:
            assert "\n" not in str(error)


def node(name: str) -> str:
    """A small object."""
    return f"kind: Node\nmetadata: {{name: {name}}}\n"


def names(path: Path) -> list[str]:
    """The names of the objects read."""
    return [found.key.name for found in load_manifests(str(path)).objects]


def test_folder_is_read_in_order_without_subfolders(tmp_path: Path) -> None:
    """Files with the three suffixes, sorted by name, or one that is named; hidden and other files are ignored."""
    (tmp_path / "b.yml").write_text(node("b"))
    (tmp_path / "a.yaml").write_text(node("a"))
    (tmp_path / "c.json").write_text('{"kind": "Node", "metadata": {"name": "c"}}')
    (tmp_path / ".hidden.yaml").write_text(node("hidden"))
    (tmp_path / "a.yaml~").write_text(node("backup"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.yaml").write_text(node("d"))
    (tmp_path / "folder.yaml").mkdir()
    assert names(tmp_path) == ["a", "b", "c"]
    assert names(tmp_path / "a.yaml~") == ["backup"]


def test_a_file_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "_MOST_BYTES", 1 << 20)
    with pytest.raises(SourceError, match=r"^cannot parse manifests: /dev/zero: more than 1 MiB; give fewer"):
        load_manifests("/dev/zero")


def service(*names: str) -> str:
    """Services as YAML documents."""
    return "---\n".join(f"kind: Service\nmetadata: {{name: '{name}'}}\nspec: {{}}\n" for name in names)


def test_first_everything_then_changes(tmp_path: Path) -> None:
    """All three kinds are listed first and after each change of content; a touch is no change."""
    path = tmp_path / "a.yaml"
    path.write_text(service("a"))
    with Follower([ManifestWatch(str(path))]) as follower:
        follower.sees("a")
        follower.sees(kind=Kind.NODE)
        path.touch()
        path.write_text(service("a", "b"))
        follower.sees("a", "b")
        assert follower.lists() == 2


def test_file_replaced_by_rename(tmp_path: Path) -> None:
    """Editors write a new file and rename it over the old one."""
    path, new = tmp_path / "a.yaml", tmp_path / "a.yaml.new"
    path.write_text(service("a"))
    with Follower([ManifestWatch(str(path))]) as follower:
        follower.sees("a")
        new.write_text(service("b"))
        new.rename(path)
        follower.sees("b")


def test_file_gone_for_a_while(tmp_path: Path, logged: Lines) -> None:
    """While the file is missing, the last state stays, with one warning."""
    path = tmp_path / "a.yaml"
    path.write_text(service("a"))
    with Follower([ManifestWatch(str(path))]) as follower:
        follower.sees("a")
        path.unlink()
        eventually(lambda: [line for line in logged if "No such file" in line["reason"]])
        assert follower.names() == {"a"}
        path.write_text(service("b"))
        follower.sees("b")
    assert sum("No such file" in line["reason"] for line in logged) == 1


def test_folder_as_a_config_map_mounts_it(tmp_path: Path) -> None:
    """A swapped symbolic link changes all files at once."""
    for version, names in (("..v1", ("a1", "b1")), ("..v2", ("a2", "b2"))):
        (tmp_path / version).mkdir()
        for name in names:
            (tmp_path / version / f"{name[0]}.yaml").write_text(service(name))
    data = tmp_path / "..data"
    data.symlink_to("..v1")
    for name in "ab":
        (tmp_path / f"{name}.yaml").symlink_to(f"..data/{name}.yaml")
    with Follower([ManifestWatch(str(tmp_path))]) as follower:
        follower.sees("a1", "b1")
        swap = tmp_path / "..swap"
        swap.symlink_to("..v2")
        swap.rename(data)
        follower.sees("a2", "b2")
        assert follower.lists() == 2


def test_files_come_and_go_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(service("a"))
    with Follower([ManifestWatch(str(tmp_path))]) as follower:
        follower.sees("a")
        (tmp_path / "b.yaml").write_text(service("b"))
        follower.sees("a", "b")
        (tmp_path / "a.yaml").unlink()
        follower.sees("b")


def test_invalid_file_keeps_its_objects(tmp_path: Path, logged: Lines) -> None:
    """One warning with file, line and reason; changes of other files are still read."""
    (tmp_path / "a.yaml").write_text(service("a"))
    (tmp_path / "b.yaml").write_text(service("b"))
    with Follower([ManifestWatch(str(tmp_path))]) as follower:
        follower.sees("a", "b")
        (tmp_path / "a.yaml").write_text("kind: [")
        eventually(lambda: [line for line in logged if "a.yaml:2: invalid YAML" in line["reason"]])
        (tmp_path / "b.yaml").write_text(service("c"))
        follower.sees("a", "c")
        (tmp_path / "a.yaml").write_text(service("d"))
        follower.sees("c", "d")
    assert sum("invalid YAML" in line["reason"] for line in logged) == 1


def test_growing_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(service("a"))
    with Follower([ManifestWatch(str(path))]) as follower:
        follower.sees("a")
        with path.open("w") as file:
            for name in "bcdefghijklmnop":
                file.write(service(name) + "---\n")
                file.flush()
                time.sleep(0.06)  # faster than the watch believes a change
        follower.sees(*"bcdefghijklmnop")
        assert follower.lists() == 2


def test_change_that_leaves_time_and_size_alone(tmp_path: Path) -> None:
    """A second change within the same tick of the file system's clock is read."""
    path = tmp_path / "a.yaml"
    path.write_text(service("a"))
    stamp = path.stat()
    with Follower([ManifestWatch(str(path))]) as follower:
        follower.sees("a")
        path.write_text(service("b"))
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        follower.sees("b")


def test_faulty_object_is_logged_once(tmp_path: Path, logged: Lines) -> None:
    """A faulty object is one warning, not repeated when another part of the file changes."""
    path = tmp_path / "a.yaml"
    bad = "kind: Service\nmetadata: {name: bad}\nspec: {ports: [{port: x}]}\n---\n"
    path.write_text(bad + service("a"))
    with Follower([ManifestWatch(str(path))]) as follower:
        follower.sees("a")
        path.write_text(bad + service("b"))
        follower.sees("b")
    lines = [line["reason"] for line in logged if line["log_level"] == "warning"]
    assert lines == [f"{path}:1: Service bad is skipped: spec.ports[0].port: expected `int`, got `str`"]


WATCH = """
import threading
from pykubeproxy.sources.manifests import ManifestWatch
watch = ManifestWatch("-")
emit = lambda event: print(event.kind.value, len(event.objects), flush=True)
thread = threading.Thread(target=watch.run, args=(emit,), daemon=True)
thread.start()
thread.join(1.5)
assert thread.is_alive()
"""
LOAD = "from pykubeproxy.sources.manifests import load_manifests; print(load_manifests('-').objects[0].name)"


def read_stdin(code: str, text: str) -> tuple[bytes, bytes]:
    """Return the output and the errors of a program with this standard input."""
    done = subprocess.run(
        [sys.executable, "-c", code], input=text.encode(), capture_output=True, check=False, timeout=PATIENCE
    )
    return done.stdout, done.stderr


def test_standard_input_is_read_once() -> None:
    """To its end; then nothing more happens."""
    assert read_stdin(WATCH, service("a"))[0].split() == b"Service 1 EndpointSlice 0 Node 0".split()
    assert read_stdin(LOAD, service("a"))[0] == b"a\n"
    assert b"cannot parse manifests: <stdin>:2: invalid YAML" in read_stdin(LOAD, "a: [")[1]


def test_a_first_read_that_fails_is_an_error(tmp_path: Path) -> None:
    """Of one line; it ends a watch."""
    for read in (
        load_manifests,
        lambda path: ManifestWatch(path).run(print),
        lambda path: ManifestWatch(path).once(),
    ):
        with pytest.raises(SourceError, match=r"cannot read manifests .*absent: No such file or directory"):
            read(str(tmp_path / "absent"))
        (tmp_path / "a.yaml").write_text("a: [")
        with pytest.raises(SourceError, match=r"cannot parse manifests: .*a\.yaml:2: invalid YAML"):
            read(str(tmp_path))


def test_every_kind_is_listed(tmp_path: Path) -> None:
    """A kind without objects gives an empty list."""
    (tmp_path / "a.yaml").write_text(service("a"))
    listed = ManifestWatch(str(tmp_path)).once()
    assert [(one.kind, len(one.objects)) for one in listed] == [*zip(Kind, (1, 0, 0), strict=True)]


def test_later_of_two_objects_counts(tmp_path: Path, logged: Lines) -> None:
    """With one warning."""
    (tmp_path / "a.yaml").write_text(service("a", "b"))
    with Follower([ManifestWatch(str(tmp_path))]) as follower:
        follower.sees("a", "b")
        (tmp_path / "b.yaml").write_text(service("a").replace("{}", "{clusterIP: None}"))
        eventually(lambda: follower.lists() == 2)
        (later,) = (found for found in load_manifests(str(tmp_path)).objects if found.key.name == "a")
        assert isinstance(later, Service)
        assert later.headless
        (tmp_path / "c.yaml").write_text(service("c"))
        follower.sees("a", "b", "c")
    lines = [line["reason"] for line in logged if line["log_level"] == "warning"]
    assert lines == [f"{tmp_path}/a.yaml:1: Service default/a skipped: defined again at {tmp_path}/b.yaml:1"]


GIVEN = "{apiVersion: v1, kind: Service, metadata: {name: web}, spec: %s}"


def test_a_port_of_a_slice_without_a_name_has_the_empty_name() -> None:
    """As an API server stores it; kube-proxy ignores a port whose name is null."""
    slice_ = "{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: a}, addressType: IPv4, ports: [{port: 1}]}"
    (found,) = read_manifest(slice_.encode(), "f.yaml").objects
    assert isinstance(found.object, EndpointSlice)
    assert [port.name for port in found.object.ports] == [""]


@pytest.mark.parametrize(
    ("spec", "lacks"),
    [
        ("{ports: [{port: 80}]}", "clusterIP"),
        ("{type: NodePort, ports: [{port: 80}]}", "clusterIP and nodePort"),
        (
            "{type: NodePort, clusterIP: 10.96.0.1, ports: [{port: 80, nodePort: 30080}, {name: b, port: 81}]}",
            "nodePort",
        ),
        ("{clusterIP: 10.96.0.1, ports: [{port: 80}]}", ""),
        ("{clusterIP: None, ports: [{port: 80}]}", ""),
        ("{type: ExternalName, externalName: example.com}", ""),
    ],
)
def test_what_an_api_server_would_assign_is_named(spec: str, lacks: str) -> None:
    warnings = read_manifest((GIVEN % spec).encode(), "f.yaml").warnings
    assert [text.partition(" has no ")[2].partition(",")[0] for text in warnings] == (
        [lacks] if lacks else []
    )
