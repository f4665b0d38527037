"""Features tried in a network namespace of its own."""

import fcntl
from pathlib import Path

import pytest

from pykubeproxy.kernel import Backend, Iptables, NotPermitted, Runner, interfaces, open_iptables, trial
from pykubeproxy.kernel.namespace import in_namespace_of_its_own
from pykubeproxy.kernel.trial import Feature, Lack, Trial, try_features
from pykubeproxy.objects import Family

pytestmark = pytest.mark.root


def here() -> str:
    """The network namespace of this thread."""
    return str(Path("/proc/thread-self/ns/net").readlink())


def test_the_namespace_is_new_and_goes() -> None:
    """Work is done in a namespace of its own, without the interfaces of this one; the caller stays where it was."""

    def look() -> tuple[str, list[str]]:
        return here(), [interface.name for interface in interfaces.interfaces()]

    before = here()
    there, present = in_namespace_of_its_own(look)
    assert there != before
    assert "eth0" not in present
    assert here() == before


def test_what_is_raised_there(inside: str) -> None:
    """An error of the work is the caller's."""
    with pytest.raises(ZeroDivisionError):
        in_namespace_of_its_own(lambda: 1 // 0)


def test_everything_works(backend: Backend, family: Family, inside: str) -> None:
    """Every feature is there, and the tables here stay untouched."""
    iptables = open_iptables(backend, family)
    assert try_features(iptables) == Trial(())
    assert not iptables.legacy_tables()
    assert iptables.runner.run(("nft", "list", "ruleset")).stdout == ""


def test_the_lock_is_left_alone(inside: str, tmp_path: Path) -> None:
    """Who holds the lock of the legacy tables does not keep a trial waiting, and a trial makes no lock file."""
    lock = tmp_path / "lock"
    iptables = open_iptables(Backend.LEGACY, Family.IPV4, Runner((), {"XTABLES_LOCKFILE": str(lock)}))
    assert try_features(iptables) == Trial(())
    assert not lock.exists()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert try_features(iptables) == Trial(())


def test_one_is_lacking(
    backend: Backend, family: Family, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that do not work are named, each with a reason; the others are not."""
    nonsense = (
        Feature("match nonsense", "xt_nonsense", "-m nonsense -j RETURN"),
        Feature("match helper", "xt_helper", "-m helper --helper nothing --nonsense", required=False),
    )
    monkeypatch.setattr(trial, "FEATURES", (nonsense[0], *trial.FEATURES, nonsense[1]))
    found = try_features(open_iptables(backend, family))
    assert [(lack.feature, lack.required) for lack in found.lacking] == [
        ("match nonsense", True),
        ("match helper", False),
    ]
    assert all(lack.reason for lack in found.lacking)
    assert found.alone == ""


def test_no_counters(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where counters cannot be made that is the reason, not what iptables makes of it."""
    monkeypatch.setattr(trial.nfacct, "ensure", lambda _: trial.nfacct.Ensured(False, "no counters"))
    found = try_features(open_iptables(Backend.NFT, Family.IPV4))
    assert found.lacking == (
        Lack("match nfacct", "xt_nfacct and nfnetlink_acct", "no counters", required=False),
    )


def test_not_permitted(iptables: Iptables, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no namespace can be made, the kernel is asked, and the reason is told."""

    def refuse(_: object) -> Trial:
        raise NotPermitted("making a network namespace", "Operation not permitted", "CAP_SYS_ADMIN")

    monkeypatch.setattr(trial, "in_namespace_of_its_own", refuse)
    assert try_features(iptables) == Trial((), alone="Operation not permitted")
