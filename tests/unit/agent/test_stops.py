"""What ends the process: a change of the configuration file."""

import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import create_autospec

import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent import stops
from pykubeproxy.agent.mailbox import Mailbox, Stop
from pykubeproxy.agent.stops import ConfigFileWatch
from pykubeproxy.kernel import InstanceLock, KernelError
from tests.fakes.cluster import ConfigMapVolume


def watch(path: Path) -> ConfigFileWatch:
    return ConfigFileWatch(str(path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "config.conf"
    path.write_text("a: 1\n")
    os.utime(path, ns=(1, 1))
    return path


def replace(path: Path) -> None:
    """Replace a file by one of the same size and time of modification."""
    new = path.with_suffix(".new")
    new.write_text("a: 2\n")
    os.utime(new, ns=(1, 1))
    new.rename(path)


@pytest.mark.parametrize(
    ("action", "changed"),
    [
        (lambda path: path.write_text("a: 2\n"), True),
        (lambda path: path.write_text(""), True),
        (lambda path: path.write_text("a: 1\nb: 2\n"), True),
        (replace, True),
        (Path.read_text, False),
        (os.utime, False),
        (lambda path: path.write_text("a: 1\n"), False),
        (lambda path: path.chmod(0o600), False),
        (lambda path: path.with_suffix(".link").hardlink_to(path), False),
    ],
)
def test_written_or_replaced_file_is_changed(
    path: Path, action: Callable[[Path], object], changed: bool
) -> None:
    """As in kube-proxy, one that is touched is not; nor is one that is linked or has another mode."""
    watched = watch(path)
    action(path)
    assert watched.changed() is changed


def test_moved_file_is_unchanged_when_it_is_back(path: Path) -> None:
    watched = watch(path)
    moved = path.rename(path.with_suffix(".moved"))
    assert not watched.changed()
    moved.rename(path)
    assert not watched.changed()


def test_removed_file_is_unchanged_until_it_is_back(path: Path) -> None:
    watched = watch(path)
    path.unlink()
    assert not watched.changed()
    path.write_text("a: 2\n")
    assert watched.changed()


def test_file_written_after_a_config_map_update_is_changed(tmp_path: Path) -> None:
    volume = ConfigMapVolume(tmp_path / "config", "a: 1\n")
    watched = watch(volume.path)
    volume.update("a: 2\n")
    assert not watched.changed()
    volume.path.write_text("a: 3\n\n")
    assert watched.changed()


def test_a_file_written_before_the_thread_starts_posts_one_stop(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stops, "_PERIOD", 0.0)
    mailbox = Mailbox()
    watched = watch(path)
    path.write_text("a: 2\n")
    stops.watch_files(create_autospec(InstanceLock, instance=True), watched, mailbox.put)
    assert mailbox.take(0) == [Stop(1, f"configuration file {path} was updated")]


def test_the_instance_lock_is_kept_without_a_configuration_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until another agent was faster."""
    monkeypatch.setattr(stops, "_PERIOD", 0.0)
    lock, mailbox = create_autospec(InstanceLock, instance=True), Mailbox()
    lock.restore.side_effect = [False, True, KernelError("another agent has the lock")]
    with capture_logs() as lines:
        stops.watch_files(lock, None, mailbox.put)
    assert [line["event"] for line in lines] == ["instance lock restored"]
    assert mailbox.take(0) == [Stop(1, "another agent has the lock")]
