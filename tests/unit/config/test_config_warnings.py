"""Ignored settings in a file are warnings that name them."""

import pytest

from pykubeproxy.config import load

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


@pytest.mark.parametrize(
    ("body", "warning"),
    [
        (
            "iptables: {syncPeriode: 5s}",
            "The field iptables.syncPeriode is unknown and ignored. Did you mean iptables.syncPeriod?",
        ),
        (
            "clusterCidr: 10.0.0.0/8",
            "The field clusterCidr is unknown and ignored. Did you mean clusterCIDR?",
        ),
        (
            "masqueradeAll: true",
            "The field masqueradeAll is unknown and ignored. Did you mean iptables.masqueradeAll?",
        ),
        (
            "pykubeproxy: {iptables-backend: nft}",
            "The field pykubeproxy.iptables-backend is unknown and ignored. Did you mean pykubeproxy.iptablesBackend?",
        ),
        ("zebra: {stripes: 5}", "The field zebra is unknown and ignored."),
        ('"a\\nb": 5', "The field 'a\\nb' is unknown and ignored."),
        ("1: 5", "The field 1 is unknown and ignored."),
        (
            "iptables.masqueradeBit: 5",
            'The field "iptables.masqueradeBit" is unknown and ignored. Did you mean iptables.masqueradeBit?',
        ),
    ],
)
def test_an_unknown_field_is_named(body: str, warning: str) -> None:
    """The path of an unknown field is in the warning, with the field that was probably meant."""
    config, warnings = load(HEAD + body, {})
    assert warnings == (warning,)
    assert config == load(HEAD, {}).config


def test_duplicate_field_is_a_warning_and_the_last_counts() -> None:
    """A duplicate key is a warning, in a section too; the last one counts."""
    config, warnings = load(
        HEAD + "oomScoreAdj: 1\niptables: {masqueradeBit: 1, masqueradeBit: 2}\noomScoreAdj: 3", {}
    )
    assert sorted(warnings) == [
        "The field iptables.masqueradeBit is set more than once; the last value counts.",
        "The field oomScoreAdj is set more than once; the last value counts.",
    ]
    assert (config.oom_score_adj, config.iptables.masquerade_bit) == (3, 2)


def test_duplicate_field_in_json_is_a_warning_too() -> None:
    text = (
        '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "oomScoreAdj": 1,'
        ' "iptables": {"masqueradeBit": 1, "masqueradeBit": 2}, "oomScoreAdj": 3, "x": {"y": 1, "y": 2}}'
    )
    config, warnings = load(text, {})
    assert sorted(warnings) == [
        "The field iptables.masqueradeBit is set more than once; the last value counts.",
        "The field oomScoreAdj is set more than once; the last value counts.",
        "The field x is unknown and ignored.",
    ]
    assert (config.oom_score_adj, config.iptables.masquerade_bit) == (3, 2)


@pytest.mark.parametrize("rest", ["---\n\nkind: Other", "...\n# next\na: [", "---\n---\nb: ["])
def test_a_further_document_is_a_warning(rest: str) -> None:
    """Only the first document counts, whatever follows."""
    config, warnings = load(f"oomScoreAdj: 3  # \u00e4\u6f22\n{HEAD}{rest}", {})
    assert warnings == ("The document in line 6 is ignored; only the first one counts.",)
    assert config.oom_score_adj == 3
