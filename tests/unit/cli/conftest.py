from typing import NoReturn

import pytest

from pykubeproxy.cli import running_agent
from pykubeproxy.kernel import Runner


@pytest.fixture
def no_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """iptables need not be there, and the agent is not asked."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("runs a command or asks an agent")

    monkeypatch.setattr(Runner, "run", refuse)
    monkeypatch.setattr(running_agent, "fetch", refuse)
