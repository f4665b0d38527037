"""kube-proxy and the agent at the same time."""

from pathlib import Path

import pytest

from pykubeproxy.kernel import Iptables, KernelError
from tests.fakes.follower import eventually
from tests.fakes.process import HEALTH, answers, running
from tests.fakes.traffic import Traffic
from tests.system.test_continuity_handover import CASES, KubeProxy, agent_flags, tables

__all__ = ["tables"]
pytestmark = pytest.mark.root


def written(kube_proxy: KubeProxy) -> bool:
    """Write kube-proxy's rules; return False if the agent wrote at the same time, as kube-proxy then tries again."""
    try:
        kube_proxy.start()
    except KernelError:
        return False
    return True


def test_no_connection_fails_while_both_run(tables: Iptables, tmp_path: Path) -> None:
    """Each replaces the rules of the other, three times; the agent's form is a dispatch tree."""
    ways, _ = CASES["nodeport"]
    flags = agent_flags("nodeport", tables, tmp_path)
    kube_proxy = KubeProxy("nodeport", tables)
    kube_proxy.start()
    with Traffic(ways) as traffic, running(tmp_path / "log", *flags):
        eventually(lambda: answers(HEALTH, "/readyz", 200), 30)
        for _ in range(3):
            eventually(lambda: not kube_proxy.is_in_force(), 30)
            eventually(lambda: written(kube_proxy))
            before = traffic.total()
            eventually(lambda before=before: traffic.total() > before + 40)
        eventually(lambda: not kube_proxy.is_in_force(), 60)
    assert not traffic.failures(), traffic
    assert "drift repaired" in (tmp_path / "log").read_text()  # several writes may need one repair
