"""The directory of a lab: one driver at a time, found again by name."""

import subprocess
import sys
from pathlib import Path

import pytest

from pykubeproxy.lab import rundir
from pykubeproxy.lab.rundir import AlreadyRunning, RunDirectory


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Labs live in a directory of the test's own."""
    monkeypatch.setattr(rundir, "BASE", tmp_path / "labs")
    return tmp_path / "labs"


@pytest.mark.parametrize("name", ["", "A", "1st", "a-b", "a/b", "..", "x" * 21])
def test_names(name: str) -> None:
    """A name that could be mistaken for another lab's, or for a path, is refused."""
    with pytest.raises(ValueError, match="no name for a lab"):
        RunDirectory(name)


def test_one_driver() -> None:
    """The lock is held once; a second one is told what to do."""
    first, second = RunDirectory("lab"), RunDirectory("lab")
    first.lock()
    assert second.held
    with pytest.raises(AlreadyRunning, match="pykubeproxy lab down --name lab"):
        second.lock()
    first.release()
    assert not second.held
    second.lock()


def test_lock_goes_with_the_process(base: Path) -> None:
    """A driver that was killed holds nothing; its directory stays to be cleared up."""
    held = (
        "import sys, time; from pathlib import Path; from pykubeproxy.lab import rundir;"
        f"rundir.BASE = Path({str(base)!r}); rundir.RunDirectory('lab').lock();"
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
    assert rundir.labs() == ["lab"]


def test_state() -> None:
    """What was written last is read; nothing written reads as empty."""
    directory = RunDirectory("lab")
    directory.lock()
    assert directory.read_state() == {}
    directory.write_state({"driver": 1})
    directory.write_state({"driver": 2})
    assert RunDirectory("lab").read_state() == {"driver": 2}


def test_clear_and_remove(base: Path) -> None:
    """Clearing keeps the lock; removing leaves no trace, and does not mind being done twice."""
    directory = RunDirectory("lab")
    directory.lock()
    (directory.path / "logs").mkdir()
    (directory.path / "logs" / "old.log").write_text("old")
    directory.clear()
    assert [path.name for path in directory.path.iterdir()] == ["lock"]
    assert RunDirectory("lab").held
    directory.remove()
    directory.remove()
    assert not base.exists()
