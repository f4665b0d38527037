from pathlib import Path
from typing import NoReturn

import pytest

from pykubeproxy.kernel import Runner
from pykubeproxy.nodes import agent as running_agent


@pytest.fixture
def no_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """iptables need not be there, and the agent is not asked."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("runs a command or asks an agent")

    monkeypatch.setattr(Runner, "run", refuse)
    monkeypatch.setattr(running_agent, "fetch", refuse)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration file with another cluster CIDR than usual."""
    path = tmp_path / "config.yaml"
    path.write_text(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nclusterCIDR: 10.0.0.0/8\n"
    )
    return path
