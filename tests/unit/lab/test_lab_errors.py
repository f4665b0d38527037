"""Errors of `pykubeproxy lab` are one line that says what failed."""

import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import urllib3
from click.testing import CliRunner

from pykubeproxy.cli.lab import lab
from pykubeproxy.lab import daemon, machine
from pykubeproxy.lab.api import Api
from pykubeproxy.lab.machine import LabError, LabExists, RunDirectory


@pytest.fixture
def one_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "check_requirements", lambda: None)
    monkeypatch.setattr(machine, "lab_names", lambda: ["mine"])
    monkeypatch.setattr(RunDirectory, "held", True)


@pytest.mark.usefixtures("one_running")
def test_an_unknown_lab_is_named() -> None:
    with pytest.raises(LabError, match=r"no lab other is running; running: mine$"):
        daemon.select_lab("other")


@pytest.mark.parametrize(("name", "used"), [(None, "demo3"), ("mine", "mine")])
def test_demos_take_the_first_free_name(monkeypatch: pytest.MonkeyPatch, name: str | None, used: str) -> None:
    """A name that the caller chose is not replaced."""

    def made(name: str, **_: str) -> AbstractContextManager[str]:
        if name in ("demo", "demo2"):
            raise LabExists(name)
        return nullcontext(name)

    monkeypatch.setattr(daemon, "Lab", made)
    with daemon.demo_lab(name, "auto") as found:
        assert str(found) == used
    with pytest.raises(LabExists), daemon.demo_lab("demo2", "auto"):
        pass


@pytest.mark.usefixtures("one_running")
def test_status_without_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """`lab status` names the API server and its log if it does not answer."""

    def refused(self: Api, path: str) -> None:
        raise urllib3.exceptions.NewConnectionError(None, "Connection refused")  # type: ignore[arg-type]

    monkeypatch.setattr(Api, "items", refused)
    result = CliRunner().invoke(lab, ["status", "--name", "mine"])
    log = Path(RunDirectory("mine").logs) / "apiserver.log"
    assert result.exit_code == 2
    assert result.output == (
        f"Error: the API server of lab mine does not answer at http://10.0.0.1:6443; see {log},"
        " or remove the lab with `pykubeproxy lab down --name mine`\n"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--proxy-mode", "nftables"), "add --kube-proxy PATH"),
        (
            ("--kube-proxy", shutil.which("true") or ""),
            "true --version does not print a version of Kubernetes",
        ),
    ],
)
def test_what_is_no_kube_proxy_starts_no_lab(given: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(lab, ["up", *given])
    assert result.exit_code == 2
    assert message in result.output
