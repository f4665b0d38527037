"""Test features in a temporary network namespace."""

import fcntl
from pathlib import Path

import pytest

from pykubeproxy.kernel import Backend, Iptables, NotPermitted, Runner, addresses, open_iptables, trial
from pykubeproxy.kernel.system import run_in_new_namespace
from pykubeproxy.kernel.trial import Feature, MissingFeature, Trial, try_features
from pykubeproxy.objects import Family

pytestmark = pytest.mark.root


def here() -> str:
    """The network namespace of this thread."""
    return str(Path("/proc/thread-self/ns/net").readlink())


def test_runs_in_a_new_namespace() -> None:
    """The work sees none of this namespace's interfaces; the caller stays in its own."""

    def look() -> tuple[str, list[str]]:
        return here(), [interface.name for interface in addresses.interfaces()]

    before = here()
    there, present = run_in_new_namespace(look)
    assert there != before
    assert "eth0" not in present
    assert here() == before


def test_exceptions_reach_the_caller(inside: str) -> None:
    """An exception of the work is raised in the caller."""
    with pytest.raises(ZeroDivisionError):
        run_in_new_namespace(lambda: 1 // 0)


def test_complete_kernel(backend: Backend, family: Family, inside: str) -> None:
    """No feature is missing, and the tables here stay untouched."""
    iptables = open_iptables(backend, family)
    assert try_features(iptables) == Trial(())
    assert not iptables.legacy_tables()
    assert iptables.runner.run(("nft", "list", "ruleset")).stdout == ""


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
    monkeypatch.setattr(trial, "FEATURES", (nonsense[0], *trial.FEATURES, nonsense[1]))
    found = try_features(open_iptables(backend, family))
    assert [(lack.name, lack.required) for lack in found.missing] == [
        ("match nonsense", True),
        ("match helper", False),
    ]
    assert all(lack.reason for lack in found.missing)
    assert found.untested == ""


def test_missing_counter_explains_nfacct(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If counters cannot be created, that is the reason, not the iptables error."""
    monkeypatch.setattr(trial.nfacct, "ensure", lambda _: "no counters")
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

    monkeypatch.setattr(trial, "run_in_new_namespace", refuse)
    assert try_features(iptables) == Trial((), untested="Operation not permitted")
