"""Complete names of Services from live rules if no agent runs."""

from pathlib import Path

import click
import pytest

from pykubeproxy.cli.completion import services
from pykubeproxy.cli.dump_rules import dump_rules
from pykubeproxy.kernel import Backend, open_iptables
from pykubeproxy.objects import Family
from tests.cases import as_restore_input

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


def completed(incomplete: str) -> list[str]:
    return [it.value for it in services(click.Context(dump_rules), dump_rules.params[0], incomplete)]
