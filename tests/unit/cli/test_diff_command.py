"""`pykubeproxy diff` without a kernel: manifests and configurations against each other."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pykubeproxy.cli.diff import diff

OLD = Path(__file__).parents[2] / "data" / "manifests" / "explain.yaml"
HERE = ("--hostname-override", "node1")


def compared(*arguments: object) -> Result:
    return CliRunner().invoke(diff, [str(it) for it in arguments], catch_exceptions=False)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """The same objects, save that an endpoint has another address."""
    path = tmp_path / "new.yaml"
    path.write_text(OLD.read_text().replace("10.244.1.9", "10.244.1.8"))
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nclusterCIDR: 10.0.0.0/8\n"
    )
    return path


def test_standard_input_for_both() -> None:
    """It can be read once only: the other side would be found empty."""
    result = compared("-f", "-", "--against", "-", *HERE)
    assert (result.exit_code, result.stdout) == (2, "")
    assert 'only one of -f and --against can be "-"' in result.stderr


def test_same() -> None:
    """Without a difference nothing is printed but a line on standard error, and the exit code is 0."""
    result = compared("-f", OLD, "--against", OLD, *HERE)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"There is no difference: {OLD}, {OLD}.\n"


def test_manifests(new: Path) -> None:
    """What going from --against to -f changes, in words and with exit code 1."""
    result = compared("-f", new, "--against", OLD, *HERE)
    assert (result.exit_code, result.stderr) == (1, "")
    text = " ".join(result.stdout.split())
    assert text.startswith(f"IPv4: {OLD} → {new} kube-system/dns:dns UDP: 1 endpoint gone: 10.244.1.9:53; ")
    assert "IPv6" not in text


def test_forms(new: Path) -> None:
    """The other forms have the same exit codes; JSON says that there is no difference, too."""
    result = compared("-f", new, "--against", OLD, *HERE, "-o", "rules")
    assert result.exit_code == 1
    assert result.stdout.startswith(f"--- {OLD}, IPv4\n+++ {new}, IPv4\n@@ ")
    result = compared("-f", new, "--against", OLD, *HERE, "-o", "json")
    assert (result.exit_code, json.loads(result.stdout)["different"]) == (1, True)
    result = compared("-f", OLD, "--against", OLD, *HERE, "-o", "json")
    assert (result.exit_code, json.loads(result.stdout)["different"]) == (0, False)


def test_family(new: Path) -> None:
    """Only the family asked for counts."""
    assert compared("-f", new, "--against", OLD, *HERE, "--family", "ipv6").exit_code == 0


def test_configurations(config: Path) -> None:
    """The same objects under two configurations: that of the flags or --config, against another."""
    result = compared("-f", OLD, "--against-config", config, *HERE)
    assert result.exit_code == 1
    assert result.stdout.startswith(f"IPv4: the same objects with {config} →")
    assert "ns/web:http: other rules, which lead to the same endpoints as before\n" in result.stdout
    assert compared("-f", OLD, "--config", config, "--against-config", config, *HERE).exit_code == 0


def test_both(new: Path, config: Path) -> None:
    """Other objects under another configuration."""
    result = compared("-f", new, "--against", OLD, "--against-config", config, *HERE)
    assert result.exit_code == 1
    assert result.stdout.split("→")[0].strip() == f"IPv4: {OLD} with {config}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("-f", "missing.yaml", "--against", OLD),
        ("-f", OLD, "--against", "missing.yaml"),
        ("-f", OLD, "--against", OLD, "--config", "missing.conf"),
        ("-f", OLD, "--against-config", "missing.conf"),
        ("--against", OLD, "--kubeconfig", "missing.conf"),
        ("-f", OLD, "--against", OLD, "--masquerade-all=maybe"),
        ("--nonsense",),
    ],
)
def test_trouble(arguments: tuple[object, ...]) -> None:
    """What cannot be compared is exit code 2 and a line on standard error, as with diff."""
    result = compared(*arguments, *HERE)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith("Error: ")
