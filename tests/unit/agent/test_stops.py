"""What ends the process: a change of the configuration file."""

import os
from pathlib import Path

import pytest

from pykubeproxy.agent import stops
from pykubeproxy.agent.mailbox import Mailbox, Stop
from pykubeproxy.agent.stops import ConfigFileWatch
from tests.fakes.cluster import ConfigMapVolume


def watch(path: Path) -> ConfigFileWatch:
    return ConfigFileWatch(str(path), lambda _: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "config.conf"
    path.write_text("a: 1\n")
    os.utime(path, ns=(1, 1))
    return path


def test_untouched_file_is_unchanged(path: Path) -> None:
    watched = watch(path)
    path.read_text()
    assert not watched.changed()


@pytest.mark.parametrize("text", ["a: 2\n", "", "a: 1\nb: 2\n"])
def test_written_file_is_changed(path: Path, text: str) -> None:
    watched = watch(path)
    path.write_text(text)
    assert watched.changed()


def test_file_replaced_by_rename_is_changed(path: Path) -> None:
    """Also with the same size and time of modification."""
    watched = watch(path)
    new = path.with_suffix(".new")
    new.write_text("a: 2\n")
    os.utime(new, ns=(1, 1))
    new.rename(path)
    assert watched.changed()


def test_touched_file_is_unchanged(path: Path) -> None:
    """As in kube-proxy; nor is one that is written with the same text, linked or has another mode."""
    watched = watch(path)
    os.utime(path)
    assert not watched.changed()
    path.write_text("a: 1\n")
    path.chmod(0o600)
    path.with_suffix(".link").hardlink_to(path)
    assert not watched.changed()


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


def test_config_map_update_is_no_change(tmp_path: Path) -> None:
    volume = ConfigMapVolume(tmp_path / "config", "a: 1\n")
    watched = watch(volume.path)
    volume.update("a: 2\n")
    assert not watched.changed()


def test_file_written_after_a_config_map_update_is_changed(tmp_path: Path) -> None:
    volume = ConfigMapVolume(tmp_path / "config", "a: 1\n")
    watched = watch(volume.path)
    volume.update("a: 2\n")
    assert not watched.changed()
    volume.path.write_text("a: 3\n\n")
    assert watched.changed()


def test_file_written_before_the_thread_starts_posts_one_stop(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stops, "_PERIOD", 0.0)
    mailbox = Mailbox()
    watched = ConfigFileWatch(str(path), mailbox.put)
    path.write_text("a: 2\n")
    watched.run()
    assert mailbox.take(0) == [Stop(1, f"configuration file {path} was updated")]
