"""Only validated data reaches a rule."""

import json

import pytest

from pykubeproxy.config import load
from pykubeproxy.objects import Family, Kind, Undecodable, Updated, decode
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.render import render
from pykubeproxy.services.cluster import Cluster
from tests.invalid_objects import SYNTAX, WHOLE
from tests.objects import slice_of
from tests.strategies import NODE

CONFIG = load({"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}, {}).config


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("text", SYNTAX)
@pytest.mark.parametrize("place", ["name", "namespace", "port", "range", "ip"])
def test_syntax_never_becomes_part_of_a_rule(family: Family, place: str, text: str) -> None:
    """Quotes, line breaks and options in any field are data or rejected."""
    whole = json.loads(json.dumps(WHOLE[Kind.SERVICE]))
    match place:
        case "name" | "namespace":
            whole["metadata"][place] = text
        case "port":
            whole["spec"]["ports"][0]["name"] = text
        case "range":
            whole["spec"]["loadBalancerSourceRanges"] = [text]
        case "ip":
            whole["spec"]["externalIPs"] = [text]
    cluster = Cluster()
    cluster.apply(Updated(slice_of("10.244.1.5")))
    try:
        cluster.apply(Updated(decode(Kind.SERVICE, json.dumps(whole).encode())))
    except Undecodable as error:
        assert str(error).isprintable()
    for rules in render(cluster, rule_context(CONFIG, NODE, None, KernelFacts(), family)).chains.values():
        for rule in rules:
            assert rule.isascii()
            assert rule.isprintable()
            assert rule.count('"') in (0, 2)
            assert "reboot" not in rule
