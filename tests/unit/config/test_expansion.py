"""A few lines of YAML that would come to gigabytes are refused before they are expanded."""

import pytest

from pykubeproxy.config import ConfigError, load
from pykubeproxy.sources.documents import Unparsable, read

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


def tower(first: str, level: str) -> str:
    """Ten levels, each of which names the one below ten times."""
    levels = (f"a{n}: &a{n} " + level.format(",".join([f"*a{n - 1}"] * 10)) + "\n" for n in range(1, 11))
    return f"a0: &a0 {first}\n" + "".join(levels)


BOMBS = {
    "lists": tower("[x]", "[{}]"),
    "mappings": tower("{k: v}", "{{l: [{}]}}"),
    "merges": tower("{k: v}", "{{<<: [{}]}}"),
    "text": f"a: &a {'x' * 1000000}\nb: [{', '.join(['*a'] * 11)}]\n",
    "documents": "---\n" + tower("[x]", "[{}]"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_too_much(name: str) -> None:
    """In manifests and in a configuration file, with the line where it gets too much."""
    with pytest.raises(Unparsable, match=r"^x\.yaml:\d+: no YAML: its aliases stand for too much$"):
        read(BOMBS[name].encode(), "x.yaml")
    with pytest.raises(ConfigError, match="its aliases stand for too much, line "):
        load(HEAD + BOMBS[name], {})


def test_too_deep() -> None:
    """As deep as the loader in C does not get."""
    with pytest.raises(Unparsable, match="nested too deeply"):
        read(b"[" * 100_000, "x.yaml")
    with pytest.raises(ConfigError, match="nested too deeply"):
        load("a: " + "[" * 100_000, {})


def test_aliases_as_people_use_them() -> None:
    """Anchors, aliases and merges in moderation are no offence, and much text without them is none either."""
    long = "kind: Service\nmetadata: {name: a}\nspec: {clusterIP: 10.0.0.1}\nx: " + "y" * 11_000_000
    several = (
        "kind: List\nitems:\n- {kind: Service, metadata: {name: a}, spec: &spec {clusterIP: 10.0.0.1}}\n"
    )
    several += "- {kind: Service, metadata: {name: b}, spec: {<<: *spec, type: NodePort}}\n"
    assert [it.object.key.name for it in read(several.encode(), "x.yaml").found] == ["a", "b"]
    assert len(read(long.encode(), "x.yaml").found) == 1
