"""Completion of hosts, labs and scenarios."""

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from pykubeproxy.cli import main
from pykubeproxy.lab import machine

HOSTS = {"one": ["node1", "web-1"], "two": ["node1", "api-1"]}


@pytest.fixture(autouse=True)
def labs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "BASE", tmp_path)
    for name, hosts in HOSTS.items():
        (tmp_path / name).mkdir()
        machine.RunDirectory(name).write_state({"hosts": [{"name": host} for host in hosts]})


@pytest.mark.parametrize(
    ("words", "begun", "wanted"),
    [
        (["exec"], "", ["api-1", "node1", "web-1"]),
        (["exec", "--name", "two"], "", ["api-1", "node1"]),
        (["stop"], "web", ["web-1"]),
        (["down", "--name"], "t", ["two"]),
        (["demo"], "min", ["min-sync-period"]),
    ],
)
def test_completion(words: list[str], begun: str, wanted: list[str]) -> None:
    complete = ShellComplete(main, {}, "pykubeproxy", "_PYKUBEPROXY_COMPLETE")
    assert [item.value for item in complete.get_completions(["lab", *words], begun)] == wanted
