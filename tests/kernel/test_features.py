"""Probe the features of kernel and iptables."""

import json
import sys
from pathlib import Path

import pytest

from pykubeproxy.kernel import (
    Backend,
    Iptables,
    KernelError,
    NotPermitted,
    Runner,
    features,
    has_nat,
    ipv6_disabled,
    probe_features,
    system,
    unsupported_reason,
)
from pykubeproxy.kernel.features import kernel_has
from pykubeproxy.objects import Family

pytestmark = pytest.mark.root

SNIPPET = """
import json, sys
from pykubeproxy.kernel import Backend, open_iptables, probe_features
from pykubeproxy.objects import Family
found = probe_features(open_iptables(Backend(sys.argv[1]), Family(sys.argv[2])))
print(json.dumps([found.random_fully, found.nfacct, found.sctp, found.absent]))
"""


def test_complete_kernel(iptables: Iptables, inside: str) -> None:
    """Everything is available, and probing leaves no table behind."""
    found = probe_features(iptables).require()
    assert (found.random_fully, found.nfacct, found.sctp, found.absent) == (True, True, True, ())
    assert unsupported_reason(iptables.backend, iptables.family) == ""
    assert not iptables.legacy_tables()
    assert iptables.runner.run(("nft", "list", "ruleset")).stdout == ""


def test_kernel_has(backend: Backend, family: Family, inside: str) -> None:
    """The kernel distinguishes matches, targets and unknown names."""
    assert kernel_has(backend, family, "statistic")
    assert kernel_has(backend, family, "DNAT", target=True)
    assert not kernel_has(backend, family, "DNAT")
    assert not kernel_has(backend, family, "nonsense")


def test_missing_required_match(iptables: Iptables, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the kernel module and the iptables extension."""
    monkeypatch.setattr(features, "_MATCHES", {**features._MATCHES, "nonsense": "xt_nonsense"})
    found = probe_features(iptables)
    assert found.absent == ("kernel module xt_nonsense", "iptables extension nonsense")
    with pytest.raises(KernelError, match="xt_nonsense"):
        found.require()


def test_missing_optional_match(iptables: Iptables, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nfacct in the kernel, the other features remain."""
    monkeypatch.setattr(
        features,
        "kernel_has",
        lambda backend, family, name, **kind: name != "nfacct" and kernel_has(backend, family, name, **kind),
    )
    found = probe_features(iptables).require()
    assert not found.nfacct
    assert found.random_fully


def test_kernel_without_nat(
    backend: Backend, family: Family, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason names the family and the modules."""
    monkeypatch.setattr(features, "kernel_has", lambda *_, **__: False)
    assert family.value in unsupported_reason(backend, family)
    assert "xt_nat" in unsupported_reason(backend, family)


def test_ipv6_disabled_by_sysctl(backend: Backend, inside: str) -> None:
    """IPv4 is served on; nf_tables itself would take IPv6 rules."""
    assert ipv6_disabled() == unsupported_reason(backend, Family.IPV6) == ""
    system.write_setting("net/ipv6/conf/all/disable_ipv6", 1)
    reason = "IPv6 is disabled (net.ipv6.conf.all.disable_ipv6 = 1)"
    assert ipv6_disabled() == unsupported_reason(backend, Family.IPV6) == reason
    assert unsupported_reason(backend, Family.IPV4) == ""
    assert has_nat(backend, Family.IPV6)


def test_kernel_without_ipv6(tmp_path: Path) -> None:
    """Booted with ipv6.disable=1, it has neither settings nor interfaces of IPv6."""
    assert "ipv6.disable=1" in ipv6_disabled(tmp_path)
    (tmp_path / "proc/thread-self/net").mkdir(parents=True)
    (tmp_path / "proc/thread-self/net/if_inet6").touch()
    assert ipv6_disabled(tmp_path) == ""


@pytest.mark.parametrize("allowed", [True, False])
def test_probing_needs_cap_net_admin_only(
    backend: Backend, family: Family, runner: Runner, allowed: bool
) -> None:
    """Without CAP_NET_ADMIN, the error names it."""
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
