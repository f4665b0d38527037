"""Choose the iptables backend."""

import pytest

from pykubeproxy.kernel import (
    Backend,
    Iptables,
    Runner,
    choose_backend,
    open_iptables,
    other_backend_with_chain,
)
from pykubeproxy.kernel import iptables as iptables_module
from pykubeproxy.kernel.iptables import default_backend
from pykubeproxy.kernel.legacy import entries
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey

pytestmark = pytest.mark.root

OTHER = {Backend.NFT: Backend.LEGACY, Backend.LEGACY: Backend.NFT}
SOME_RULES = "*nat\n:SOME - [0:0]\n-A SOME -j RETURN\n-A SOME -j RETURN\nCOMMIT\n"


def untouched(runner: Runner) -> bool:
    """Whether no legacy table exists in either family."""
    return not any(open_iptables(Backend.LEGACY, family, runner).legacy_tables() for family in Family)


@pytest.mark.parametrize("hint", ["KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"])
def test_kubelet_hint_decides(iptables: Iptables, runner: Runner, hint: str) -> None:
    """The kubelet's chain in mangle decides in either family, though the other backend has more rules."""
    iptables.restore(f"*mangle\n:{hint} - [0:0]\nCOMMIT\n")
    open_iptables(OTHER[iptables.backend], Family.IPV4, runner).restore(SOME_RULES)
    assert choose_backend("auto", runner) is iptables.backend


def test_backend_with_more_rules_wins(iptables: Iptables, runner: Runner) -> None:
    """Without a hint, the backend with more rules is chosen."""
    iptables.restore(SOME_RULES)
    other = open_iptables(OTHER[iptables.backend], Family.IPV4, runner)
    other.restore("*nat\n:OTHER - [0:0]\n-A OTHER -j RETURN\nCOMMIT\n")
    assert choose_backend("auto", runner) is iptables.backend


def test_only_backend_with_rules_wins(
    inside: str, iptables: Iptables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules are not counted, which takes seconds for a large table."""
    monkeypatch.setattr(iptables_module, "_LARGE", 1)
    monkeypatch.setattr(iptables_module, "_count_rules", lambda iptables: pytest.fail(f"counted {iptables}"))
    iptables.restore(SOME_RULES)
    assert choose_backend("auto") is iptables.backend
    open_iptables(OTHER[iptables.backend], iptables.family).restore(SOME_RULES)
    with pytest.raises(pytest.fail.Exception, match="counted"):
        choose_backend("auto")


@pytest.mark.usefixtures("inside")
def test_empty_chains_do_not_decide(iptables: Iptables) -> None:
    """Nor does the number of entries of iptables-legacy, which counts chains."""
    iptables.restore("*nat\n:SOME - [0:0]\nCOMMIT\n")
    assert choose_backend("auto") is default_backend(Runner())


@pytest.mark.usefixtures("inside")
def test_rules_of_all_tables_count(iptables: Iptables) -> None:
    """Also those of tables that hold no rules of a proxy."""
    other = open_iptables(OTHER[iptables.backend], iptables.family)
    other.restore("*nat\n-A OUTPUT -j ACCEPT\nCOMMIT\n")
    iptables.restore("*raw\n-A OUTPUT -j ACCEPT\n-A OUTPUT -j ACCEPT\nCOMMIT\n")
    assert choose_backend("auto") is iptables.backend


def test_empty_node_uses_the_plain_command(runner: Runner) -> None:
    """Without rules, the plain iptables command decides; no legacy table is created."""
    assert choose_backend("auto", runner) is default_backend(runner)
    assert untouched(runner)


def test_configured_backend_wins(backend: Backend, runner: Runner) -> None:
    """A configured backend is used, whatever the tables hold."""
    open_iptables(OTHER[backend], Family.IPV4, runner).restore(SOME_RULES)
    assert choose_backend(backend.value, runner) is backend


def test_reading_creates_no_legacy_table(runner: Runner, family: Family) -> None:
    """Missing legacy tables read as empty and stay missing."""
    legacy = open_iptables(Backend.LEGACY, family, runner)
    assert len(legacy.save()) == len(legacy.save(("nat",))) == len(legacy.save(("nat", "filter"))) == 0
    assert untouched(runner)


def test_backend_holding_the_chain_comes_first(iptables: Iptables, runner: Runner) -> None:
    """A read-only caller gets the backend that holds the chain, despite hints and numbers of rules."""
    iptables.restore("*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n")
    other = open_iptables(OTHER[iptables.backend], Family.IPV4, runner)
    other.restore(f"*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n{SOME_RULES}")
    assert choose_backend("auto", runner, holding=ChainKey("nat", "KUBE-SERVICES")) is iptables.backend
    assert choose_backend("auto", runner, holding=ChainKey("nat", "KUBE-NONE")) is other.backend
    assert choose_backend("auto", runner) is other.backend


def test_entries_of_a_legacy_table(inside: str, runner: Runner, family: Family) -> None:
    """Two entries for each user-defined chain, one for each rule and policy; no table is created."""
    assert entries(family, "nat") == 0
    assert untouched(runner)
    legacy = open_iptables(Backend.LEGACY, family, runner)
    legacy.restore("*nat\nCOMMIT\n")
    empty = entries(family, "nat")
    legacy.restore(SOME_RULES)
    assert entries(family, "nat") == empty + 4


def test_large_legacy_table_is_not_searched(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large table counts as holding the chain; a smaller one is searched."""
    holding = ChainKey("nat", "KUBE-SERVICES")
    open_iptables(Backend.LEGACY, Family.IPV4).restore(SOME_RULES)
    open_iptables(Backend.NFT, Family.IPV4).restore(SOME_RULES.replace("COMMIT", "-A SOME -j RETURN\nCOMMIT"))
    assert choose_backend("auto", holding=holding) is Backend.NFT
    monkeypatch.setattr(iptables_module, "_LARGE", 4)
    assert choose_backend("auto", holding=holding) is Backend.LEGACY


def test_other_backend_with_chain(iptables: Iptables, runner: Runner) -> None:
    """The backend in use need not have the chain; no table is created."""
    services, other = ChainKey("nat", "KUBE-SERVICES"), OTHER[iptables.backend]
    assert other_backend_with_chain(other, services, runner) is None
    assert untouched(runner)
    iptables.restore("*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n")
    assert other_backend_with_chain(other, services, runner) is iptables.backend
    assert other_backend_with_chain(iptables.backend, services, runner) is None
