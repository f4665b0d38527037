"""`pykubeproxy diff` of files and configurations, without a kernel."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pykubeproxy.cli.diff import diff
from tests.cases import load_case, nft_list
from tests.fakes.cluster import node, service, slice_of

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


def test_no_differences() -> None:
    """Without differences, print one line to standard error and exit with 0."""
    result = compared("-f", OLD, "--against", OLD, *HERE)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"No differences: {OLD}, {OLD}.\n"


def test_objects_in_files(new: Path) -> None:
    """Describe the change from --against to -f and exit with 1."""
    result = compared("-f", new, "--against", OLD, *HERE)
    assert (result.exit_code, result.stderr) == (1, "")
    text = " ".join(result.stdout.split())
    assert text.startswith(
        f"IPv4: {OLD} → {new} kube-system/dns:dns UDP: 1 endpoint removed: 10.244.1.9:53; "
    )
    assert "IPv6" not in text


def test_output_formats(new: Path) -> None:
    """All formats have the same exit codes; JSON also reports that there is no difference."""
    result = compared("-f", new, "--against", OLD, *HERE, "-o", "rules")
    assert result.exit_code == 1
    assert result.stdout.startswith(f"--- {OLD}, IPv4\n+++ {new}, IPv4\n@@ ")
    result = compared("-f", new, "--against", OLD, *HERE, "-o", "json")
    assert (result.exit_code, json.loads(result.stdout)["different"]) == (1, True)
    result = compared("-f", OLD, "--against", OLD, *HERE, "-o", "json")
    assert (result.exit_code, json.loads(result.stdout)["different"]) == (0, False)


def test_meaning_of_another_form(tmp_path: Path) -> None:
    """A tree of chains means the same as a flat chain."""
    objects = tmp_path / "objects.json"
    items, ports = [node("node1", "10.0.0.1")], {"ports": [{"name": "", "port": 8080}]}
    for n in range(60):
        items += [service(f"s{n}", clusterIP=f"10.96.{n}.1"), slice_of(f"s{n}", f"10.244.1.{n}") | ports]
    objects.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    sides: list[str] = []
    for dispatch, option in (("flat", "--config"), ("tree", "--against-config")):
        path = tmp_path / dispatch
        path.write_text(
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
            f"clusterCIDR: 10.244.0.0/16\npykubeproxy: {{dispatch: {dispatch}}}\n"
        )
        sides += [option, str(path)]
    assert compared("-f", objects, *sides, *HERE).exit_code == 1
    result = compared("-f", objects, *sides, *HERE, "--meaning")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith("No differences: ")


def test_meaning_names_clients_and_what_they_get(new: Path) -> None:
    """An endpoint with another address: the same for all clients."""
    result = compared("-f", new, "--against", OLD, *HERE, "--meaning")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert "2 wrong Services" in lines[0] or "1 wrong Service" in lines[0]
    assert lines.index(f"- {OLD}") + 1 == lines.index(f"+ {new}")
    at = lines.index("kube-system/dns:dns at 10.96.0.53:53 UDP")
    assert lines[at + 1] == "  from this node and elsewhere"
    assert next(it for it in lines[at:] if "10.244.1.9:53" in it).startswith("    - 10.244.1.9:53 50%")
    assert next(it for it in lines[at:] if "10.244.1.8:53" in it).startswith("    + 10.244.1.8:53 50%")


def test_meaning_as_json(new: Path) -> None:
    """JSON names ranges of clients, and says when there is no difference."""
    result = compared("-f", new, "--against", OLD, *HERE, "--meaning", "-o", "json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["different"]) == (1, True)
    (node_,) = document["nodes"]
    first = node_["clients"][0]
    assert first["origin"] == "node"
    assert {it["endpoint"] for it in first["before"]} != {it["endpoint"] for it in first["after"]}
    assert sum(it["probability"] for it in first["after"]) == pytest.approx(1)
    result = compared("-f", OLD, "--against", OLD, *HERE, "--meaning", "-o", "json")
    assert (result.exit_code, json.loads(result.stdout)["different"]) == (0, False)


def test_meaning_has_no_text_of_rules(new: Path) -> None:
    result = compared("-f", new, "--against", OLD, *HERE, "--meaning", "-o", "rules")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "-o rules" in result.stderr


def test_family(new: Path) -> None:
    """With --family, compare that family only."""
    assert compared("-f", new, "--against", OLD, *HERE, "--family", "ipv6").exit_code == 0


def test_configurations(config: Path) -> None:
    """Compare the same objects with two configurations."""
    result = compared("-f", OLD, "--against-config", config, *HERE)
    assert result.exit_code == 1
    assert result.stdout.startswith(f"IPv4: the same objects with {config} →")
    assert "ns/web:http: different rules for the same endpoints\n" in result.stdout
    assert compared("-f", OLD, "--config", config, "--against-config", config, *HERE).exit_code == 0


def test_objects_and_configuration(new: Path, config: Path) -> None:
    """Compare other objects with another configuration."""
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
def test_errors(arguments: tuple[object, ...]) -> None:
    """On errors, print one line to standard error and exit with 2, as diff does."""
    result = compared(*arguments, *HERE)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith("Error: ")


def test_an_unreadable_configuration_names_its_option() -> None:
    """The error names the option that has the path."""
    result = compared("-f", OLD, "--against-config", "missing.conf", *HERE)
    assert result.exit_code == 2
    assert "Error: --against-config: cannot read missing.conf: No such file or directory" in result.output


@pytest.fixture
def nft_node(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return objects, rules in nftables mode for them, and rules that lack an endpoint."""
    case = load_case("nodeport")
    objects = tmp_path / "objects.json"
    objects.write_text(
        json.dumps({"apiVersion": "v1", "kind": "List", "items": [case["node"], *case["objects"]]})
    )
    rules, wrong = tmp_path / "node1.json", tmp_path / "wrong.json"
    rules.write_text(nft_list("nodeport"))
    wrong.write_text(nft_list("nodeport").replace("10.244.1.11", "10.244.1.99"))
    return objects, rules, wrong


def test_rules_of_nftables_mode_are_compared_by_meaning(nft_node: tuple[Path, Path, Path]) -> None:
    objects, rules, wrong = nft_node
    options = (
        "-f",
        objects,
        "--hostname-override",
        "node1",
        "--cluster-cidr",
        "10.244.0.0/16,fd00:10:244::/56",
    )
    result = compared("--rules", rules, *options)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith("No differences: ")
    result = compared("--rules", wrong, *options)
    assert result.exit_code == 1
    assert "1 endpoint missing: 10.244.1.11:" in " ".join(result.stdout.split())
    result = compared("--rules", rules, *options, "-o", "rules")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "runs kube-proxy in nftables mode" in result.stderr
