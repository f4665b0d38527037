"""Run every conformance case with the packages of the image: render, write and read back on both backends."""

from functools import partial

from pykubeproxy.kernel import Backend, open_iptables
from pykubeproxy.kernel.system import run_in_new_namespace
from pykubeproxy.objects import Family
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.render import full_input, render
from pykubeproxy.rules.ruleset import Ruleset
from tests.cases import ADDRESSES, NAMES, cluster_of, comparable, config_of, expected, load_case, node_of


def main() -> None:
    """Raise AssertionError if a case differs, KernelError if iptables rejects one."""
    for name in NAMES:
        for family in Family:
            rendered_as_recorded(name, family)
            for backend in Backend:
                run_in_new_namespace(partial(reads_back, name, family, backend))
    print(f"{len(NAMES)} cases passed in both families on both backends")


def rendered_as_recorded(name: str, family: Family) -> None:
    """Check that the rendered rules equal kube-proxy's."""
    case = load_case(name)
    on = rule_context(config_of(case), "node1", node_of(case), KernelFacts(ADDRESSES), family)
    ensured = {**skeleton.JUMPS, skeleton.KUBELET_FIREWALL: skeleton.kubelet_firewall(on.options)}
    whole = Ruleset(family, {**render(cluster_of(case), on).chains, **ensured})
    assert comparable(whole) == comparable(expected(case, family)), f"{name} {family.value} differs"


def reads_back(name: str, family: Family, backend: Backend) -> None:
    """Check that the kernel accepts the rules and returns them unchanged."""
    case = load_case(name)
    on = rule_context(config_of(case), "node1", node_of(case), KernelFacts(ADDRESSES, nfacct=False), family)
    rendered = render(cluster_of(case), on)
    iptables = open_iptables(backend, family)
    iptables.restore(full_input(rendered, on.options))
    live = iptables.save().chains
    for key, rules in rendered.chains.items():
        assert live[key] == rules, f"{name} {family.value} {backend.value}: {key} was {rules}, is {live[key]}"


if __name__ == "__main__":
    main()
