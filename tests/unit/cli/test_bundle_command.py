"""`pykubeproxy bundle`: where it writes, and what it says."""

import io
import re
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pykubeproxy.bundle.layout import OBJECTS, TABLES
from pykubeproxy.bundle.read import read_bundle
from pykubeproxy.cli import bundle as command
from pykubeproxy.cli.bundle import bundle
from tests.fakes.bundles import failing, section
from tests.fakes.http_client import free_port
from tests.fakes.process import agent
from tests.unit.agent.conftest import Serve, serve

__all__ = ["serve"]


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A node with one table, and another one that cannot be read."""
    refused = failing(TABLES[1], PermissionError("Permission denied"))
    monkeypatch.setattr(command, "node_sections", lambda **_: [section(TABLES[0], b"x"), refused])
    monkeypatch.setattr(command, "host_name", lambda: "this-node")
    monkeypatch.chdir(tmp_path)


def asked(*arguments: str, url: str = "") -> Result:
    return CliRunner().invoke(bundle, [*arguments, "--url", url or f"http://127.0.0.1:{free_port()}"])


def test_default_name_has_node_and_time(tmp_path: Path) -> None:
    result = asked()
    assert result.exit_code == 0
    (path,) = tmp_path.iterdir()
    assert re.fullmatch(r"pykubeproxy-bundle-this-node-\d{8}T\d{6}Z\.tar\.gz", path.name)
    assert (result.stdout, stat.S_IMODE(path.stat().st_mode)) == (f"{path.name}\n", 0o600)
    assert f"this-node: no {TABLES[1]}: Permission denied" in result.stderr
    with path.open("rb") as file:
        assert read_bundle(file, "b").files[TABLES[0]] == b"x"


def test_standard_output_has_the_bundle_only() -> None:
    result = asked("-o", "-")
    assert read_bundle(io.BytesIO(result.stdout_bytes), "b").manifest.node == "this-node"
    assert f"no {TABLES[1]}" in result.stderr


def test_no_bundle_without_any_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refused = failing(TABLES[0], PermissionError("Permission denied"))
    monkeypatch.setattr(command, "node_sections", lambda **_: [refused, section("sysctls.txt", b"x")])
    result = asked("-o", "b")
    assert (result.exit_code, [*tmp_path.iterdir()]) == (2, [])
    assert result.stderr == "Error: no rules can be read, so there is no bundle: Permission denied\n"


def test_folder_gets_a_new_file_and_no_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert asked("-o", "out").stdout.startswith("out/pykubeproxy-bundle-this-node-")
    (tmp_path / "b").write_text("precious")
    result = asked("-o", "b")
    assert (result.exit_code > 0, (tmp_path / "b").read_text()) == (True, "precious")
    assert "b exists; remove it, or choose another name with -o" in result.stderr
    result = asked("-o", "missing/b")
    assert "cannot write missing/b: No such file or directory" in result.stderr


def test_agent_gives_its_objects_even_if_it_is_busy(serve: Serve, tmp_path: Path) -> None:
    url = agent(serve, busy=1)
    result = asked("-o", "b.tar.gz", url=url)
    with (tmp_path / "b.tar.gz").open("rb") as file:
        found = read_bundle(file, "b")
    assert b"10.42.1.1" in found.files[OBJECTS]
    assert OBJECTS not in result.stderr


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "[ 1/" not in asked("-o", "a").stderr
    monkeypatch.setattr(command, "_on_terminal", lambda: True)
    assert f"[ 1/6] {TABLES[0]}\n" in asked("-o", "b").stderr
