"""Manifests that change while they are watched."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pykubeproxy.objects import Kind
from pykubeproxy.sources import ManifestWatch, SourceError
from tests.fakes.follower import Follower, eventually


def service(*names: str) -> str:
    """Services as YAML documents."""
    return "---\n".join(f"kind: Service\nmetadata: {{name: {name}}}\nspec: {{}}\n" for name in names)


def test_first_everything_then_changes(tmp_path: Path) -> None:
    """All three kinds are listed at first, and again when the content differs; a mere touch is no change."""
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
    """While the file is missing the last state stays, and one line says so."""
    path = tmp_path / "a.yaml"
    path.write_text(service("a"))
    with Follower([ManifestWatch(str(path))]) as follower:
        follower.sees("a")
        path.unlink()
        eventually(lambda: [line for line in logged if "No such file" in line["event"]])
        assert follower.names() == {"a"}
        path.write_text(service("b"))
        follower.sees("b")
    assert sum("No such file" in line["event"] for line in logged) == 1


def test_folder_as_a_config_map_mounts_it(tmp_path: Path) -> None:
    """A symbolic link to another folder with the same file names is swapped: all changes are seen together."""
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
    """A new file adds objects, a file that is removed takes its objects along."""
    (tmp_path / "a.yaml").write_text(service("a"))
    with Follower([ManifestWatch(str(tmp_path))]) as follower:
        follower.sees("a")
        (tmp_path / "b.yaml").write_text(service("b"))
        follower.sees("a", "b")
        (tmp_path / "a.yaml").unlink()
        follower.sees("b")


def test_file_that_no_longer_parses_keeps_what_it_held(tmp_path: Path, logged: list[Any]) -> None:
    """One warning with file, line and reason; other files of the folder go on changing."""
    (tmp_path / "a.yaml").write_text(service("a"))
    (tmp_path / "b.yaml").write_text(service("b"))
    with Follower([ManifestWatch(str(tmp_path))]) as follower:
        follower.sees("a", "b")
        (tmp_path / "a.yaml").write_text("kind: [")
        eventually(lambda: [line for line in logged if "a.yaml:2: no YAML" in line["event"]])
        (tmp_path / "b.yaml").write_text(service("c"))
        follower.sees("a", "c")
        (tmp_path / "a.yaml").write_text(service("d"))
        follower.sees("c", "d")
    assert sum("no YAML" in line["event"] for line in logged) == 1


def test_file_written_by_halves(tmp_path: Path) -> None:
    """While a file is still growing nothing is taken over, though each half parses."""
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
    """A second change within the same tick of the file system's clock is seen."""
    path = tmp_path / "a.yaml"
    path.write_text(service("a"))
    stamp = path.stat()
    with Follower([ManifestWatch(str(path))]) as follower:
        follower.sees("a")
        path.write_text(service("b"))
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        follower.sees("b")


def test_bad_object_is_told_once(tmp_path: Path, logged: list[Any]) -> None:
    """A bad object is one warning, not repeated when another part of the file changes."""
    path = tmp_path / "a.yaml"
    bad = "kind: Service\nmetadata: {name: bad}\nspec: {ports: [{port: x}]}\n---\n"
    path.write_text(bad + service("a"))
    with Follower([ManifestWatch(str(path))]) as follower:
        follower.sees("a")
        path.write_text(bad + service("b"))
        follower.sees("b")
    lines = [line["event"] for line in logged if line["log_level"] == "warning"]
    assert lines == [f"{path}:1: Service bad is passed over: spec.ports[0].port: expected `int`, got `str`"]


def test_nothing_to_begin_with(tmp_path: Path) -> None:
    """At first a missing or broken file ends the watch with an error of one line."""
    watch = ManifestWatch(str(tmp_path / "absent"))
    with pytest.raises(SourceError, match="No such file"):
        watch.run(lambda event: None)
    (tmp_path / "a.yaml").write_text("a: [")
    with pytest.raises(SourceError, match=r"a\.yaml:2: no YAML"):
        ManifestWatch(str(tmp_path)).run(lambda event: None)
    with pytest.raises(SourceError, match=r"a\.yaml:2: no YAML"):
        ManifestWatch(str(tmp_path)).once()


def test_once(tmp_path: Path) -> None:
    """A single read gives a list for each kind."""
    (tmp_path / "a.yaml").write_text(service("a"))
    assert [it.kind for it in ManifestWatch(str(tmp_path)).once()] == list(Kind)


STDIN = """
import sys, threading, time
from pykubeproxy.sources import ManifestWatch
watch = ManifestWatch("-")
thread = threading.Thread(target=watch.run, args=(lambda event: print(event.kind.value, len(event.objects), flush=True),))
print("started", flush=True)
thread.start()
if sys.argv[1] == "wait":
    thread.join(1.5)
    assert thread.is_alive()
started = time.monotonic()
watch.stop()
thread.join()
assert time.monotonic() - started < 1
"""


def test_standard_input_is_read_once() -> None:
    """The standard input is read to its end, then nothing more happens until stop."""
    done = subprocess.run(
        [sys.executable, "-c", STDIN, "wait"],
        input=service("a").encode(),
        capture_output=True,
        check=True,
        timeout=20,
    )
    assert done.stdout.split() == b"started Service 1 EndpointSlice 0 Node 0".split()


def test_stop_while_the_standard_input_is_open() -> None:
    """A standard input that never ends does not keep the watch from ending."""
    with subprocess.Popen(
        [sys.executable, "-c", STDIN, "stop"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as it:
        assert it.wait(timeout=20) == 0
        assert it.stdout
        assert it.stdout.read() == b"started\n"


def test_object_given_twice_is_told(tmp_path: Path, logged: list[Any]) -> None:
    """Of two objects with one name the later file's counts; one line says so."""
    (tmp_path / "a.yaml").write_text(service("a", "b"))
    with Follower([ManifestWatch(str(tmp_path))]) as follower:
        follower.sees("a", "b")
        (tmp_path / "b.yaml").write_text(service("a"))
        eventually(lambda: follower.lists() == 2)
        (tmp_path / "c.yaml").write_text(service("c"))
        follower.sees("a", "b", "c")
    lines = [line["event"] for line in logged if line["log_level"] == "warning"]
    assert lines == [
        f"{tmp_path}/a.yaml:1: Service default/a is passed over: it is given again at {tmp_path}/b.yaml:1"
    ]
