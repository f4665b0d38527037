"""YAML whose aliases stand for gigabytes is rejected before it is expanded."""

import pytest

from pykubeproxy.config import ConfigError, load
from pykubeproxy.sources.documents import InvalidManifest, read

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
    """In manifests and in a configuration file, with the line of the excess."""
    with pytest.raises(
        InvalidManifest, match=r"^x\.yaml:\d+: invalid YAML: its aliases expand to too much data$"
    ):
        read(BOMBS[name].encode(), "x.yaml")
    with pytest.raises(ConfigError, match="its aliases expand to too much data, line "):
        load(BOMBS[name] + HEAD, {})


def test_too_deep() -> None:
    """Before libyaml overruns its stack."""
    with pytest.raises(InvalidManifest, match="nested too deeply"):
        read(b"[" * 100_000, "x.yaml")
    with pytest.raises(ConfigError, match="nested too deeply"):
        load("a: " + "[" * 100_000, {})


def test_moderate_aliases() -> None:
    """Moderate anchors, aliases and merges are accepted, and so is much text without them."""
    long = "kind: Service\nmetadata: {name: a}\nspec: {clusterIP: 10.0.0.1}\nx: " + "y" * 11_000_000
    several = (
        "kind: List\nitems:\n- {kind: Service, metadata: {name: a}, spec: &spec {clusterIP: 10.0.0.1}}\n"
    )
    several += "- {kind: Service, metadata: {name: b}, spec: {<<: *spec, type: NodePort}}\n"
    assert [it.object.key.name for it in read(several.encode(), "x.yaml").objects] == ["a", "b"]
    assert len(read(long.encode(), "x.yaml").objects) == 1
