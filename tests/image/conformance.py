"""Every conformance case with the packages of the image alone: rendered, and written and read back on both backends."""

from functools import partial

from pykubeproxy.kernel import Backend, open_iptables
from pykubeproxy.kernel.namespace import in_namespace_of_its_own
from pykubeproxy.objects import Family
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts, terms
from pykubeproxy.rules.render import full_input, render
from pykubeproxy.rules.ruleset import Ruleset
from tests.cases import ADDRESSES, NAMES, cluster_of, comparable, config_of, expected, load_case, node_of


def main() -> None:
    """Raises AssertionError where a case differs, KernelError where iptables refuses one."""
    for name in NAMES:
        for family in Family:
            rendered_as_recorded(name, family)
            for backend in Backend:
                in_namespace_of_its_own(partial(reads_back, name, family, backend))
    print(f"{len(NAMES)} cases, both families: as kube-proxy's, and written and read back on both backends")


def rendered_as_recorded(name: str, family: Family) -> None:
    """What kube-proxy programmed, rule by rule."""
    case = load_case(name)
    on = terms(config_of(case), "node1", node_of(case), KernelFacts(ADDRESSES), family)
    ensured = {**skeleton.JUMPS, skeleton.KUBELET_FIREWALL: skeleton.kubelet_firewall(on.options)}
    whole = Ruleset(family, {**render(cluster_of(case), on).chains, **ensured})
    assert comparable(whole) == comparable(expected(case, family)), f"{name} {family.value} differs"


def reads_back(name: str, family: Family, backend: Backend) -> None:
    """The kernel takes the rules, and gives them back as they were written."""
    case = load_case(name)
    on = terms(config_of(case), "node1", node_of(case), KernelFacts(ADDRESSES, nfacct=False), family)
    rendered = render(cluster_of(case), on)
    iptables = open_iptables(backend, family)
    iptables.restore(full_input(rendered, on.options))
    live = iptables.save().chains
    for key, rules in rendered.chains.items():
        assert live[key] == rules, f"{name} {family.value} {backend.value}: {key} was {rules}, is {live[key]}"


if __name__ == "__main__":
    main()
