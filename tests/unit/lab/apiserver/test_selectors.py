"""Label and field selectors."""

import pytest

from pykubeproxy.lab.apiserver import SERVICES, ApiError
from pykubeproxy.lab.apiserver.read import Selector
from pykubeproxy.lab.apiserver.store import encoded

LABELS = {"app": "web", "tier": "front", "kubernetes.io/service-name": "web", "empty": ""}
STORED = encoded(
    SERVICES,
    {"metadata": {"name": "web", "namespace": "ns", "labels": LABELS}, "spec": {"clusterIP": "10.0.0.1"}},
    1,
)


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        ("", True),
        ("app", True),
        ("kubernetes.io/service-name", True),
        ("other", False),
        ("!other", True),
        ("!app", False),
        ("app=web", True),
        ("app==web", True),
        ("app=api", False),
        ("empty=", True),
        ("app!=api", True),
        ("app!=web", False),
        ("other!=web", True),
        ("app in (api, web)", True),
        ("app in (api)", False),
        ("app notin (api,db)", True),
        ("app notin (web)", False),
        ("other notin (web)", True),
        ("app in (api,web),tier=front", True),
        ("app in (api,web),tier=back", False),
        ("app, !other ,tier!=back", True),
    ],
)
def test_label_selector(selector: str, matches: bool) -> None:
    """Each operator, on labels that are there and that are not."""
    assert Selector(SERVICES, labels=selector).matches(STORED) is matches


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        ("metadata.name=web", True),
        ("metadata.name==api", False),
        ("metadata.namespace!=ns", False),
        ("spec.clusterIP!=None", True),
        ("spec.clusterIP=10.0.0.1,metadata.namespace=ns", True),
        ("spec.type=", True),
    ],
)
def test_field_selector(selector: str, matches: bool) -> None:
    """Each operator; a field that is absent is empty."""
    assert Selector(SERVICES, fields=selector).matches(STORED) is matches


@pytest.mark.parametrize("selector", ["a b", "=x", "!", "a in b", "a in (b", "a=b=c", "a,,b", "-a"])
def test_unparsable_label_selector(selector: str) -> None:
    """It is a 400 that quotes the part that cannot be parsed."""
    with pytest.raises(ApiError, match="unable to parse requirement") as refused:
        Selector(SERVICES, labels=selector)
    assert refused.value.code == 400
