"""The requirements and the run directory of a lab."""

import subprocess
import sys
from pathlib import Path

import pytest

from pykubeproxy.lab import machine
from pykubeproxy.lab.machine import LabError, LabExists, RunDirectory


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a temporary directory for labs."""
    monkeypatch.setattr(machine, "BASE", tmp_path / "labs")
    return tmp_path / "labs"


@pytest.mark.parametrize("name", ["", "A", "1st", "a-b", "a/b", "..", "x" * 21])
def test_invalid_name_is_rejected(name: str) -> None:
    """A name that could be a path or part of another lab's name is rejected."""
    with pytest.raises(LabError, match="invalid lab name"):
        RunDirectory(name)


def test_lock_admits_one_driver() -> None:
    """A second lock raises an error that offers no removal."""
    first, second = RunDirectory("lab"), RunDirectory("lab")
    first.lock()
    assert second.held
    with pytest.raises(LabExists, match='lab "lab" is running; choose another name with --name'):
        second.lock()
    first.release()
    assert not second.held
    second.lock()


def test_lock_ends_with_its_process(base: Path) -> None:
    """A killed driver holds no lock; its directory stays for the cleanup."""
    held = (
        "import sys, time; from pathlib import Path; from pykubeproxy.lab import machine;"
        f"machine.BASE = Path({str(base)!r}); machine.RunDirectory('lab').lock();"
        "print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", held], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    assert RunDirectory("lab").held
    process.kill()
    process.wait()
    process.stdout.close()
    assert not RunDirectory("lab").held
    assert machine.lab_names() == ["lab"]


def test_state_is_replaced() -> None:
    """The last state written is read; without one the state is empty."""
    directory = RunDirectory("lab")
    directory.lock()
    assert directory.read_state() == {}
    directory.write_state({"driver": 1})
    directory.write_state({"driver": 2})
    assert RunDirectory("lab").read_state() == {"driver": 2}


def test_clear_and_remove(base: Path) -> None:
    """Clearing keeps the lock; removing deletes all files and may be repeated."""
    directory = RunDirectory("lab")
    directory.lock()
    (directory.path / "logs").mkdir()
    (directory.path / "logs" / "old.log").write_text("old")
    directory.clear()
    assert list(directory.path.iterdir()) == []
    assert RunDirectory("lab").held
    directory.remove()
    directory.remove()
    assert not base.exists()


def test_requires_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root the error is one line."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root") as caught:
        machine.check_requirements()
    assert "\n" not in str(caught.value)


def test_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names a missing tool and how to install it."""
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool, path: None if tool == "ip6tables-save" else tool)
    with pytest.raises(
        LabError, match="missing: ip6tables-save; install them with `apt-get install iptables`"
    ):
        machine.check_requirements()
