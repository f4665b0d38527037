"""Configuration files for tests."""

from pykubeproxy.config import Config, load

HEADER: dict[str, object] = {
    "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
    "kind": "KubeProxyConfiguration",
}
HEAD = "".join(f"{field}: {value}\n" for field, value in HEADER.items())


def read(body: str) -> Config:
    """Return the Config of a file with this body, which must cause no warning."""
    config, warnings = load(HEAD + body, {})
    assert warnings == ()
    return config


def by_flags(**flags: object) -> Config:
    """Return the Config of flags alone, written with underscores; they must cause no warning."""
    config, warnings = load(None, {name.replace("_", "-"): value for name, value in flags.items()})
    assert warnings == ()
    return config
