"""Manifests that change while they are watched."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pykubeproxy.objects import Kind
from pykubeproxy.sources import SourceError
from pykubeproxy.sources.manifests import ManifestWatch
from tests.fakes.follower import Follower, eventually


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


def test_file_gone_for_a_while(tmp_path: Path, logged: list[Any]) -> None:
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
    """A new file adds objects, a removed file removes them."""
    (tmp_path / "a.yaml").write_text(service("a"))
    with Follower([ManifestWatch(str(tmp_path))]) as follower:
        follower.sees("a")
        (tmp_path / "b.yaml").write_text(service("b"))
        follower.sees("a", "b")
        (tmp_path / "a.yaml").unlink()
        follower.sees("b")


def test_invalid_file_keeps_its_objects(tmp_path: Path, logged: list[Any]) -> None:
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
    """A growing file is not read, though each half is valid."""
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


def test_faulty_object_is_logged_once(tmp_path: Path, logged: list[Any]) -> None:
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


def test_first_read_fails(tmp_path: Path) -> None:
    """If the first read fails, the watch ends with an error of one line."""
    watch = ManifestWatch(str(tmp_path / "absent"))
    with pytest.raises(SourceError, match="No such file"):
        watch.run(lambda event: None)
    (tmp_path / "a.yaml").write_text("a: [")
    with pytest.raises(SourceError, match=r"a\.yaml:2: invalid YAML"):
        ManifestWatch(str(tmp_path)).run(lambda event: None)
    with pytest.raises(SourceError, match=r"a\.yaml:2: invalid YAML"):
        ManifestWatch(str(tmp_path)).once()


def test_once(tmp_path: Path) -> None:
    """A single read gives a list for each kind."""
    (tmp_path / "a.yaml").write_text(service("a"))
    assert [it.kind for it in ManifestWatch(str(tmp_path)).once()] == list(Kind)


STDIN = """
import threading
from pykubeproxy.sources.manifests import ManifestWatch
watch = ManifestWatch("-")
emit = lambda event: print(event.kind.value, len(event.objects), flush=True)
thread = threading.Thread(target=watch.run, args=(emit,), daemon=True)
thread.start()
thread.join(1.5)
assert thread.is_alive()
"""


def test_standard_input_is_read_once() -> None:
    """The standard input is read to its end, then nothing more happens."""
    done = subprocess.run(
        [sys.executable, "-c", STDIN],
        input=service("a").encode(),
        capture_output=True,
        check=True,
        timeout=20,
    )
    assert done.stdout.split() == b"Service 1 EndpointSlice 0 Node 0".split()


def test_duplicate_object_is_logged(tmp_path: Path, logged: list[Any]) -> None:
    """Of two objects with one name the later file's counts, with one warning."""
    (tmp_path / "a.yaml").write_text(service("a", "b"))
    with Follower([ManifestWatch(str(tmp_path))]) as follower:
        follower.sees("a", "b")
        (tmp_path / "b.yaml").write_text(service("a"))
        eventually(lambda: follower.lists() == 2)
        (tmp_path / "c.yaml").write_text(service("c"))
        follower.sees("a", "b", "c")
    lines = [line["reason"] for line in logged if line["log_level"] == "warning"]
    assert lines == [f"{tmp_path}/a.yaml:1: Service default/a skipped: defined again at {tmp_path}/b.yaml:1"]
