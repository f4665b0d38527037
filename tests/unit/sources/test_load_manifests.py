"""Manifests read once: files, folders, the standard input."""

import subprocess
import sys
from pathlib import Path

import pytest

from pykubeproxy.objects import Kind, Service
from pykubeproxy.sources import SourceError, load_manifests


def node(name: str) -> str:
    """A small object."""
    return f"kind: Node\nmetadata: {{name: {name}}}\n"


def names(path: Path) -> list[str]:
    """The names of the objects read."""
    return [it.key.name for it in load_manifests(str(path)).objects]


def test_folder_is_read_in_order_without_subfolders(tmp_path: Path) -> None:
    """Files of the three suffixes, by name; hidden ones, others and subfolders are left alone."""
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
    """A path that is a file is read whatever it is called."""
    (tmp_path / "objects").write_text(node("a"))
    assert names(tmp_path / "objects") == ["a"]


def test_later_of_two_counts(tmp_path: Path) -> None:
    """An object that is given twice counts once, as given last, and a line says so."""
    (tmp_path / "a.yaml").write_text(
        "kind: Service\nmetadata: {name: x}\nspec: {type: ClusterIP}\n---\n" + node("n")
    )
    (tmp_path / "b.yaml").write_text("kind: Service\nmetadata: {name: x}\nspec: {type: NodePort}\n")
    manifests = load_manifests(str(tmp_path))
    services = [it for it in manifests.objects if isinstance(it, Service)]
    assert [it.type for it in services] == ["NodePort"]
    assert list(manifests.complaints) == [
        f"{tmp_path}/a.yaml:1: Service default/x is passed over: it is given again at {tmp_path}/b.yaml:1"
    ]


def test_every_kind_is_listed(tmp_path: Path) -> None:
    """A kind of which there is nothing is listed as empty."""
    (tmp_path / "a.yaml").write_text(node("n"))
    listed = load_manifests(str(tmp_path)).listed()
    assert {it.kind: len(it.objects) for it in listed} == {
        Kind.SERVICE: 0,
        Kind.ENDPOINT_SLICE: 0,
        Kind.NODE: 1,
    }


def test_what_cannot_be_read(tmp_path: Path) -> None:
    """A path that is not there and a file that does not parse are errors of one line."""
    with pytest.raises(SourceError, match="absent cannot be read: No such file or directory"):
        load_manifests(str(tmp_path / "absent"))
    (tmp_path / "a.yaml").write_text("a: [")
    with pytest.raises(SourceError, match=r"cannot be parsed: .*a\.yaml:2: no YAML"):
        load_manifests(str(tmp_path))


def test_standard_input() -> None:
    """A path of "-" reads the standard input to its end."""
    code = "from pykubeproxy.sources import load_manifests; print(load_manifests('-').objects[0].name)"
    done = subprocess.run(
        [sys.executable, "-c", code], input=node("n").encode(), capture_output=True, check=True, timeout=20
    )
    assert done.stdout == b"n\n"


def test_standard_input_that_does_not_parse() -> None:
    """The message names the standard input."""
    code = "from pykubeproxy.sources import load_manifests; load_manifests('-')"
    done = subprocess.run(
        [sys.executable, "-c", code], input=b"a: [", capture_output=True, check=False, timeout=20
    )
    assert b"manifests cannot be parsed: <stdin>:2: no YAML" in done.stderr
