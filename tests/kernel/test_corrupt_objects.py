"""iptables accepts the rules of corrupt objects, as far as they decode."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.config import load
from pykubeproxy.kernel import Iptables, nfacct
from pykubeproxy.objects import Kind, Object, Undecodable, Updated, decode
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.render import full_input, render
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.cluster import Cluster
from tests.grammar import violations
from tests.invalid_objects import corrupted, odd
from tests.objects import service, slice_of
from tests.strategies import NODE

CONFIG = load({"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}, {}).config


def decoded(kind: Kind, raw: bytes) -> list[Object]:
    try:
        return [decode(kind, raw)]
    except Undecodable:
        return []


@pytest.mark.root
def test_rules_of_corrupt_objects_are_accepted(iptables: Iptables, inside: str) -> None:
    """They read back; rules of other services and programs are unchanged."""
    for name in skeleton.NFACCT_NAMES:
        assert nfacct.ensure(name) == ""
    iptables.restore("*filter\n:FOREIGN - [0:0]\n-A FOREIGN -p tcp -j DROP\nCOMMIT\n")
    foreign = iptables.save().chains[ChainKey("filter", "FOREIGN")]
    rules_context = rule_context(CONFIG, NODE, None, KernelFacts(), iptables.family)
    neighbour = service("other", cluster_ip="10.96.0.99"), slice_of("10.244.1.99", service="other")

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.one_of(odd(Kind.SERVICE), odd(Kind.SERVICE), corrupted(Kind.SERVICE)),
        st.one_of(odd(Kind.ENDPOINT_SLICE), corrupted(Kind.ENDPOINT_SLICE)),
    )
    def sync_corrupt_objects(service_json: bytes, slice_json: bytes) -> None:
        cluster = Cluster()
        corrupt = [*decoded(Kind.SERVICE, service_json), *decoded(Kind.ENDPOINT_SLICE, slice_json)]
        for object_ in (*neighbour, *corrupt):
            cluster.apply(Updated(object_))
        rendered = render(cluster, rules_context)
        text = full_input(rendered, rules_context.options)
        assert violations(text) == []
        read = iptables.runner.run((iptables.tools.restore, "--noflush", "--test"), text)
        assert read.exit_code == 0, read.stderr
        FamilyTables(iptables, 200).sync(cluster, rules_context)
        live = iptables.save().chains
        assert {key: live[key] for key in rendered.chains} == rendered.chains
        assert live[ChainKey("filter", "FOREIGN")] == foreign

    sync_corrupt_objects()
