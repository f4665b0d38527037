"""Complete names of Services from live rules if no agent runs."""

from pathlib import Path

import click
import pytest

from pykubeproxy.cli.completion import services
from pykubeproxy.cli.dump_rules import dump_rules
from pykubeproxy.kernel import Backend, open_iptables
from pykubeproxy.objects import Family, Updated
from pykubeproxy.rules.dispatch import TREE_ABOVE
from tests.cases import as_restore_input
from tests.fakes.synced import SyncedFamily
from tests.objects import service

pytestmark = pytest.mark.root


def test_names_are_completed_from_live_rules(
    inside: str, monkeypatch: pytest.MonkeyPatch, backend: Backend, tmp_path: Path
) -> None:
    """With ports, and including rejected Services."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))
    iptables = open_iptables(backend, Family.IPV4)
    iptables.restore(as_restore_input("kube-dns", Family.IPV4))
    assert completed("kube-system/kube-dns:dns") == [
        "kube-system/kube-dns:dns",
        "kube-system/kube-dns:dns-tcp",
    ]
    iptables.restore(as_restore_input("no-endpoints-lb", Family.IPV4))
    assert completed("ns1") == ["ns1/web"]


def test_the_networks_of_a_dispatch_tree_are_no_names(
    inside: str, monkeypatch: pytest.MonkeyPatch, backend: Backend, tmp_path: Path
) -> None:
    """The comment of a branch names its network, such as "services at 10.96.0.0/16"."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))
    names = [f"svc{number}" for number in range(TREE_ABOVE + 1)]
    services = [service(name, cluster_ip=f"10.96.0.{number}") for number, name in enumerate(names)]
    SyncedFamily(*map(Updated, services), live=open_iptables(backend, Family.IPV4)).sync()
    assert completed("") == sorted(f"ns/{name}" for name in names)


def completed(incomplete: str) -> list[str]:
    return [
        service.value for service in services(click.Context(dump_rules), dump_rules.params[0], incomplete)
    ]
