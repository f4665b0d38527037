"""What kernel and iptables can do."""

import json
import sys

import pytest

from pykubeproxy.kernel import Backend, Iptables, Lacking, NotPermitted, Runner, features, probe, unavailable
from pykubeproxy.kernel.extensions import kernel_has
from pykubeproxy.objects import Family

pytestmark = pytest.mark.root

SNIPPET = """
import json, sys
from pykubeproxy.kernel import Backend, open_iptables, probe
from pykubeproxy.objects import Family
found = probe(open_iptables(Backend(sys.argv[1]), Family(sys.argv[2])))
print(json.dumps([found.random_fully, found.nfacct, found.sctp, found.absent]))
"""


def test_a_whole_kernel(iptables: Iptables, inside: str) -> None:
    """Here everything is there, and finding out leaves no table behind."""
    found = probe(iptables).require()
    assert (found.random_fully, found.nfacct, found.sctp, found.absent) == (True, True, True, ())
    assert unavailable(iptables.backend, iptables.family) == ""
    assert not iptables.legacy_tables()
    assert iptables.runner.run(("nft", "list", "ruleset")).stdout == ""


def test_what_rules_use_is_really_there(backend: Backend, family: Family, inside: str) -> None:
    """The kernel's answer tells what it has from what it has not."""
    assert kernel_has(backend, family, "statistic")
    assert kernel_has(backend, family, "DNAT", target=True)
    assert not kernel_has(backend, family, "DNAT")
    assert not kernel_has(backend, family, "nonsense")


def test_a_required_match_is_missing(
    iptables: Iptables, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the kernel module, and the part of iptables, that is missing."""
    monkeypatch.setattr(features, "_MATCHES", {**features._MATCHES, "nonsense": "xt_nonsense"})
    found = probe(iptables)
    assert found.absent == ("kernel module xt_nonsense", "iptables extension nonsense")
    with pytest.raises(Lacking, match="xt_nonsense"):
        found.require()


def test_an_optional_match_is_missing(
    iptables: Iptables, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without nfacct in the kernel all else is still fine."""
    monkeypatch.setattr(
        features,
        "kernel_has",
        lambda backend, family, name, **kind: name != "nfacct" and kernel_has(backend, family, name, **kind),
    )
    found = probe(iptables).require()
    assert not found.nfacct
    assert found.random_fully


def test_no_address_translation(
    backend: Backend, family: Family, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family that the kernel lacks is told with its modules."""
    monkeypatch.setattr(features, "kernel_has", lambda *_, **__: False)
    assert family.value in unavailable(backend, family)
    assert "xt_nat" in unavailable(backend, family)


@pytest.mark.parametrize("allowed", [True, False])
def test_privileges(backend: Backend, family: Family, runner: Runner, allowed: bool) -> None:
    """CAP_NET_ADMIN is enough to find out; without it the error says so."""
    keep = "-all,+net_admin" if allowed else "-all"
    limited = Runner(
        (*runner.prefix, "setpriv", "--inh-caps=-all", f"--bounding-set={keep}"), runner.environment
    )
    outcome = limited.run((sys.executable, "-c", SNIPPET, backend.value, family.value))
    if allowed:
        assert json.loads(outcome.stdout) == [True, True, True, []]
    else:
        assert "CAP_NET_ADMIN" in outcome.stderr.splitlines()[-1]
        assert NotPermitted.__name__ in outcome.stderr.splitlines()[-1]
