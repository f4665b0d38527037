"""Manifests read once: files, directories, the standard input."""

import subprocess
import sys
from pathlib import Path

import pytest

from pykubeproxy.objects import Kind, Service
from pykubeproxy.sources import SourceError, manifests
from pykubeproxy.sources.manifests import load_manifests


def node(name: str) -> str:
    """A small object."""
    return f"kind: Node\nmetadata: {{name: {name}}}\n"


def names(path: Path) -> list[str]:
    """The names of the objects read."""
    return [it.key.name for it in load_manifests(str(path)).objects]


def test_folder_is_read_in_order_without_subfolders(tmp_path: Path) -> None:
    """Files with the three suffixes, sorted by name; hidden files, other files and subdirectories are ignored."""
    (tmp_path / "b.yml").write_text(node("b"))
    (tmp_path / "a.yaml").write_text(node("a"))
    (tmp_path / "c.json").write_text('{"kind": "Node", "metadata": {"name": "c"}}')
    (tmp_path / ".hidden.yaml").write_text(node("hidden"))
    (tmp_path / "a.yaml~").write_text(node("backup"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.yaml").write_text(node("d"))
    (tmp_path / "folder.yaml").mkdir()
    assert names(tmp_path) == ["a", "b", "c"]


def test_any_suffix_when_named_directly(tmp_path: Path) -> None:
    """A path that is a file is read with any suffix."""
    (tmp_path / "objects").write_text(node("a"))
    assert names(tmp_path / "objects") == ["a"]


def test_later_of_two_counts(tmp_path: Path) -> None:
    """The last definition of an object counts, with a warning."""
    (tmp_path / "a.yaml").write_text(
        "kind: Service\nmetadata: {name: x}\nspec: {type: ClusterIP}\n---\n" + node("node1")
    )
    (tmp_path / "b.yaml").write_text("kind: Service\nmetadata: {name: x}\nspec: {type: NodePort}\n")
    manifests = load_manifests(str(tmp_path))
    services = [it for it in manifests.objects if isinstance(it, Service)]
    assert [it.type for it in services] == ["NodePort"]
    assert list(manifests.warnings) == [
        f"{tmp_path}/a.yaml:1: Service default/x skipped: defined again at {tmp_path}/b.yaml:1"
    ]


def test_every_kind_is_listed(tmp_path: Path) -> None:
    """A kind without objects gives an empty list."""
    (tmp_path / "a.yaml").write_text(node("node1"))
    listed = load_manifests(str(tmp_path)).listed()
    assert {it.kind: len(it.objects) for it in listed} == {
        Kind.SERVICE: 0,
        Kind.ENDPOINT_SLICE: 0,
        Kind.NODE: 1,
    }


def test_missing_and_invalid_files(tmp_path: Path) -> None:
    """A missing path and an invalid file are errors of one line."""
    with pytest.raises(SourceError, match=r"cannot read manifests .*absent: No such file or directory"):
        load_manifests(str(tmp_path / "absent"))
    (tmp_path / "a.yaml").write_text("a: [")
    with pytest.raises(SourceError, match=r"cannot parse manifests: .*a\.yaml:2: invalid YAML"):
        load_manifests(str(tmp_path))


def test_standard_input() -> None:
    """A path of "-" reads the standard input to its end."""
    code = (
        "from pykubeproxy.sources.manifests import load_manifests; print(load_manifests('-').objects[0].name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=node("node1").encode(),
        capture_output=True,
        check=True,
        timeout=20,
    )
    assert done.stdout == b"node1\n"


def test_standard_input_that_does_not_parse() -> None:
    """The message names the standard input."""
    code = "from pykubeproxy.sources.manifests import load_manifests; load_manifests('-')"
    done = subprocess.run(
        [sys.executable, "-c", code], input=b"a: [", capture_output=True, check=False, timeout=20
    )
    assert b"cannot parse manifests: <stdin>:2: invalid YAML" in done.stderr


def test_a_file_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "_MOST_BYTES", 1 << 20)
    with pytest.raises(SourceError, match=r"^cannot parse manifests: /dev/zero: more than 1 MiB; give fewer"):
        load_manifests("/dev/zero")
