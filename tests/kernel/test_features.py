"""Probe the features of kernel and iptables, and test them in a temporary network namespace."""

import fcntl
import json
import sys
from pathlib import Path

import pytest

from pykubeproxy.agent.startup import open_families
from pykubeproxy.config import load
from pykubeproxy.inspect.node import Question
from pykubeproxy.kernel import (
    Backend,
    Iptables,
    KernelError,
    NotPermitted,
    Runner,
    features,
    has_nat,
    ipv6_disabled,
    network,
    open_iptables,
    probe_features,
    system,
    unsupported_reason,
)
from pykubeproxy.kernel.features import Feature, MissingFeature, Trial, kernel_has, try_features
from pykubeproxy.kernel.system import run_in_new_namespace
from pykubeproxy.nodes.live import LiveNode
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
    """Everything is available, and neither probing nor trying leaves a table behind."""
    assert try_features(open_iptables(iptables.backend, iptables.family)) == Trial(())
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


def test_a_family_that_lacks_a_feature_is_left_out(
    backend: Backend, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as IPv6 in a kernel without ip6t_REJECT: the agent serves IPv4, and a comparison skips IPv6."""
    monkeypatch.setattr(
        features,
        "kernel_has",
        lambda backend, family, name, **kind: (
            (family, name) != (Family.IPV6, "REJECT") and kernel_has(backend, family, name, **kind)
        ),
    )
    reason = "this node lacks kernel module ip6t_REJECT; load them with modprobe"
    families = open_families(load(None, {"iptables-backend": backend.value}).config)
    assert [opened.tables.family for opened in families.opened] == [Family.IPV4]
    assert families.unsupported[Family.IPV6].startswith(reason)
    (node,) = LiveNode(backend.value).nodes(Question(facts=True))
    assert list(node.rules) == [Family.IPV4]
    assert node.unread["IPv6 rules"].startswith(reason)


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


def here() -> str:
    """The network namespace of this thread."""
    return str(Path("/proc/thread-self/ns/net").readlink())


def test_runs_in_a_new_namespace() -> None:
    """The work sees none of this namespace's interfaces; the caller stays in its own."""

    def look() -> tuple[str, list[str]]:
        return here(), [interface.name for interface in network.interfaces()]

    before = here()
    there, present = run_in_new_namespace(look)
    assert there != before
    assert "eth0" not in present
    assert here() == before


def test_exceptions_reach_the_caller(inside: str) -> None:
    """An exception of the work is raised in the caller."""
    with pytest.raises(ZeroDivisionError):
        run_in_new_namespace(lambda: 1 // 0)


def test_ignores_the_xtables_lock(inside: str, tmp_path: Path) -> None:
    """A held lock does not delay the test, and no lock file is created."""
    lock = tmp_path / "lock"
    iptables = open_iptables(Backend.LEGACY, Family.IPV4, Runner((), {"XTABLES_LOCKFILE": str(lock)}))
    assert try_features(iptables) == Trial(())
    assert not lock.exists()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert try_features(iptables) == Trial(())


def test_names_the_missing_features(
    backend: Backend, family: Family, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each missing feature has a reason; the others are not listed."""
    nonsense = (
        Feature("match nonsense", "xt_nonsense", "-m nonsense -j RETURN"),
        Feature("match helper", "xt_helper", "-m helper --helper nothing --nonsense", required=False),
    )
    monkeypatch.setattr(features, "FEATURES", (nonsense[0], *features.FEATURES, nonsense[1]))
    found = try_features(open_iptables(backend, family))
    assert [(lack.name, lack.required) for lack in found.missing] == [
        ("match nonsense", True),
        ("match helper", False),
    ]
    assert all(lack.reason for lack in found.missing)
    assert found.untested == ""


def test_missing_counter_explains_nfacct(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If counters cannot be created, that is the reason, not the iptables error."""
    monkeypatch.setattr(features.nfacct, "ensure", lambda _: "no counters")
    found = try_features(open_iptables(Backend.NFT, Family.IPV4))
    assert found.missing == (
        MissingFeature("match nfacct", "xt_nfacct and nfnetlink_acct", "no counters", required=False),
    )


def test_without_namespaces_it_probes(
    iptables: Iptables, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no namespace can be created, kernel and tools are probed, and the reason is returned."""

    def refuse(_: object) -> Trial:
        raise NotPermitted("cannot create a network namespace", "Operation not permitted", "CAP_SYS_ADMIN")

    monkeypatch.setattr(features, "run_in_new_namespace", refuse)
    assert try_features(iptables) == Trial((), untested="Operation not permitted")
