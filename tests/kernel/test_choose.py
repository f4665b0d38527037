"""Which backend `auto` takes."""

import pytest

from pykubeproxy.kernel import Backend, Iptables, Runner, also_holding, choose, open_iptables
from pykubeproxy.kernel import backend as backend_module
from pykubeproxy.kernel.legacy import entries
from pykubeproxy.kernel.tools import system_default
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey

pytestmark = pytest.mark.root

OTHER = {Backend.NFT: Backend.LEGACY, Backend.LEGACY: Backend.NFT}
SOME_RULES = "*nat\n:SOME - [0:0]\n-A SOME -j RETURN\n-A SOME -j RETURN\nCOMMIT\n"


def untouched(runner: Runner) -> bool:
    """Whether no legacy table exists in either family."""
    return not any(open_iptables(Backend.LEGACY, family, runner).legacy_tables() for family in Family)


@pytest.mark.parametrize("hint", ["KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"])
def test_the_kubelets_hint(iptables: Iptables, runner: Runner, hint: str) -> None:
    """The kubelet's chain in mangle decides, in either family, though the other backend has more rules."""
    iptables.restore(f"*mangle\n:{hint} - [0:0]\nCOMMIT\n")
    open_iptables(OTHER[iptables.backend], Family.IPV4, runner).restore(SOME_RULES)
    assert choose("auto", runner) is iptables.backend


def test_more_rules(iptables: Iptables, runner: Runner) -> None:
    """Without a hint the backend with more rules is taken."""
    iptables.restore(SOME_RULES)
    other = open_iptables(OTHER[iptables.backend], Family.IPV4, runner)
    other.restore("*nat\n:OTHER - [0:0]\n-A OTHER -j RETURN\nCOMMIT\n")
    assert choose("auto", runner) is iptables.backend


def test_empty_machine(runner: Runner) -> None:
    """With no rules at all it is what the plain iptables command speaks to, and legacy gains no table by the question."""
    assert choose("auto", runner) is system_default(runner)
    assert untouched(runner)


def test_asked_for(backend: Backend, runner: Runner) -> None:
    """A backend that is asked for is taken, whatever the tables hold."""
    open_iptables(OTHER[backend], Family.IPV4, runner).restore(SOME_RULES)
    assert choose(backend.value, runner) is backend


def test_reading_creates_nothing(runner: Runner, family: Family) -> None:
    """Reading legacy tables that do not exist gives none, and does not make them."""
    legacy = open_iptables(Backend.LEGACY, family, runner)
    assert len(legacy.save()) == len(legacy.save(("nat",))) == len(legacy.save(("nat", "filter"))) == 0
    assert untouched(runner)


def test_what_is_looked_for_comes_first(iptables: Iptables, runner: Runner) -> None:
    """Who only looks is shown the backend that holds it, whatever hints and numbers of rules say."""
    iptables.restore("*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n")
    other = open_iptables(OTHER[iptables.backend], Family.IPV4, runner)
    other.restore(f"*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n{SOME_RULES}")
    assert choose("auto", runner, holding=ChainKey("nat", "KUBE-SERVICES")) is iptables.backend
    assert choose("auto", runner, holding=ChainKey("nat", "KUBE-NONE")) is other.backend
    assert choose("auto", runner) is other.backend


def test_the_size_of_a_legacy_table(inside: str, runner: Runner, family: Family) -> None:
    """Told without fetching or creating it: two entries for each chain of one's own, one for each rule and policy."""
    assert entries(family, "nat") == 0
    assert untouched(runner)
    legacy = open_iptables(Backend.LEGACY, family, runner)
    legacy.restore("*nat\nCOMMIT\n")
    empty = entries(family, "nat")
    legacy.restore(SOME_RULES)
    assert entries(family, "nat") == empty + 4


def test_a_large_legacy_table_is_not_searched(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken to have what is looked for; a smaller one is asked for it."""
    holding = ChainKey("nat", "KUBE-SERVICES")
    open_iptables(Backend.LEGACY, Family.IPV4).restore(SOME_RULES)
    open_iptables(Backend.NFT, Family.IPV4).restore(SOME_RULES.replace("COMMIT", "-A SOME -j RETURN\nCOMMIT"))
    assert choose("auto", holding=holding) is Backend.NFT
    monkeypatch.setattr(backend_module, "_LARGE", 4)
    assert choose("auto", holding=holding) is Backend.LEGACY


def test_both_have_it(iptables: Iptables, runner: Runner) -> None:
    """The backend in use need not have the chain; who only looks creates nothing."""
    services, other = ChainKey("nat", "KUBE-SERVICES"), OTHER[iptables.backend]
    assert also_holding(other, services, runner) is None
    assert untouched(runner)
    iptables.restore("*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n")
    assert also_holding(other, services, runner) is iptables.backend
    assert also_holding(iptables.backend, services, runner) is None
