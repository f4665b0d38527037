"""`dump-rules`, `trace`, `diff`, `explain` and `status` with the bundle of another node."""

import json
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from pykubeproxy.bundle.layout import OBJECTS, STATUS
from pykubeproxy.cli.diff import diff
from pykubeproxy.cli.dump_rules import dump_rules
from pykubeproxy.cli.explain import explain
from pykubeproxy.cli.status import status
from pykubeproxy.cli.trace import trace
from pykubeproxy.config import Config
from pykubeproxy.nodes.objects import KnownObjects, bundle_objects, titled
from pykubeproxy.nodes.saved import bundled_node, open_bundle, saved_node
from pykubeproxy.objects import Family
from pykubeproxy.pages.statusz import AgentStatus, encode
from tests.cases import ADDRESSES, NAMES, load_case, saved_text
from tests.fakes.bundles import failing, files_of, objects_of, section, sections_of, written

pytestmark = pytest.mark.usefixtures("no_command_runs")

POD, OUTSIDE, NODE = "10.244.1.11", "203.0.113.77", "192.168.99.10"
WriteBundle = Callable[..., str]


def saved(case: str) -> dict[Family, str]:
    return {family: saved_text(case, family) for family in Family}


def invoke(command: click.Command, *arguments: object) -> Result:
    return CliRunner().invoke(command, [str(it) for it in arguments], catch_exceptions=False)


@pytest.fixture
def write_bundle(tmp_path: Path) -> WriteBundle:
    """Write the bundle of a case and return its path."""

    def write(case: str, *, with_objects: bool = True, backend: str = "nft") -> str:
        path = tmp_path / "node.tar.gz"
        tables = files_of(saved(case), backend)
        path.write_bytes(written(sections_of(case, tables, with_objects=with_objects)))
        return str(path)

    return write


@pytest.fixture
def bundle(write_bundle: WriteBundle) -> str:
    return write_bundle("nodeport")


@pytest.mark.parametrize("name", NAMES)
def test_recorded_rules_read_as_from_files(name: str, write_bundle: WriteBundle, tmp_path: Path) -> None:
    """And they have the node's addresses and routes too."""
    path = tmp_path / "rules.txt"
    path.write_text("".join(saved(name).values()))
    found = bundled_node(open_bundle(write_bundle(name)), "auto")
    assert found.tables == saved_node([str(path)], "auto").tables
    assert found.addresses == ADDRESSES
    assert [it.network for it in found.routes] == ["10.244.1.0/24", "0.0.0.0/0"]


@pytest.mark.parametrize("name", ["nodeport", "dual-stack", "lb-local", "nodeport-addresses-primary"])
def test_commands_print_what_they_print_for_files(
    name: str, write_bundle: WriteBundle, tmp_path: Path
) -> None:
    path = tmp_path / "rules.txt"
    path.write_text("".join(saved(name).values()))
    read = write_bundle(name)
    shown = invoke(dump_rules, "--bundle", read, "-o", "json")
    services = [
        json.loads(it.stdout)["nodes"][0]["services"]
        for it in (shown, invoke(dump_rules, "--rules", path, "-o", "json"))
    ]
    assert (shown.exit_code, services[0]) == (0, services[1])
    addresses = [option for it in ADDRESSES for option in ("--node-address", it)]
    packet = (OUTSIDE, f"{NODE}:30080", "--in-interface", "eth0", "-o", "json")
    traced = invoke(trace, *packet, "--rules", path, *addresses)
    assert invoke(trace, *packet, "--bundle", read).stdout == traced.stdout
    compared = invoke(diff, "--bundle", read)
    assert (compared.exit_code, compared.stdout) == (0, "")


def test_trace_finds_the_interface_by_the_routes(bundle: str) -> None:
    for source, interface in ((POD, "cni0"), (OUTSIDE, "eth0")):
        result = invoke(trace, source, "10.96.1.1:80", "--bundle", bundle, "-o", "json")
        (way,) = json.loads(result.stdout)["ways"]
        assert way["visits"][0]["interface"] == interface


@pytest.mark.parametrize("with_objects", [True, False])
def test_trace_finds_names_in_the_bundle(with_objects: bool, write_bundle: WriteBundle) -> None:
    """Without objects, rules name the Services, and no pods."""
    path = write_bundle("nodeport", with_objects=with_objects)
    result = invoke(trace, POD, "svc/ns1/web:http", "--bundle", path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "10.244.1.11:8080" in result.stdout
    result = invoke(trace, POD, "pod/ns1/nothing:80", "--bundle", path)
    known = "the agent knows only pods of Services" if with_objects else "rules do not name pods"
    assert f"there is no pod/ns1/nothing in {path}; {known}" in " ".join(result.stderr.split())


def test_diff_compares_with_the_objects_of_the_same_bundle(tmp_path: Path) -> None:
    tables = files_of(
        {it: text.replace("10.244.1.11:8080", "10.244.1.99:8080") for it, text in saved("nodeport").items()}
    )
    path = tmp_path / "node.tar.gz"
    path.write_bytes(written(sections_of("nodeport", tables)))
    result = invoke(diff, "--bundle", path, "-o", "json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    (node,) = document["nodes"]
    assert (node["before"], node["after"]) == (f"rules in {path}", f"objects and configuration in {path}")
    (service,) = node["rules"]["ports"]
    assert [it["address"] for it in service["policies"][0]["endpointsRemoved"]] == ["10.244.1.99"]


def test_diff_takes_other_objects_and_another_configuration(bundle: str, tmp_path: Path) -> None:
    """Those of the bundle fill in for what is not given."""
    case = load_case("nodeport")
    items = [it for it in case["objects"] if it["kind"] != "EndpointSlice"]
    objects, config = tmp_path / "objects.json", tmp_path / "config.json"
    objects.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": [*items, case["node"]]}))
    config.write_text(json.dumps({**case["config"], "iptables": {"masqueradeAll": True}}))
    result = invoke(diff, "--bundle", bundle, "-f", objects, "-o", "json")
    assert json.loads(result.stdout)["nodes"][0]["after"] == f"{objects} with the configuration in {bundle}"
    assert (result.exit_code, "EndpointsRemoved" in result.stdout) == (1, False)
    result = invoke(diff, "--bundle", bundle, "--config", config, "-o", "json")
    assert json.loads(result.stdout)["nodes"][0]["after"] == f"objects in {bundle} with {config}"
    assert (result.exit_code, "10.244.1.11" in result.stdout) == (1, False)


def test_bundle_of_kube_proxy_has_no_objects(write_bundle: WriteBundle, tmp_path: Path) -> None:
    """Its rules are read; commands that need objects say where to get them."""
    path = write_bundle("nodeport", with_objects=False)
    assert "ns1/web:http" in invoke(dump_rules, "--bundle", path).stdout
    for command, arguments in ((diff, ()), (explain, ("web",))):
        result = invoke(command, *arguments, "--bundle", path)
        assert (result.exit_code > 0, result.stdout) == (True, "")
        assert f"{path} has no objects (it was not collected); add -f PATH" in result.stderr
    case = load_case("nodeport")
    objects, config = tmp_path / "objects.json", tmp_path / "config.json"
    objects.write_text(
        json.dumps({"apiVersion": "v1", "kind": "List", "items": [*case["objects"], case["node"]]})
    )
    config.write_text(json.dumps(case["config"]))
    node = case["node"]["metadata"]["name"]
    result = invoke(diff, "--bundle", path, "-f", objects, "--config", config, "--hostname-override", node)
    assert (result.exit_code, result.stdout) == (0, "")


def without_config(tmp_path: Path, case: str, tables: dict[Family, str]) -> Path:
    """A bundle of kube-proxy, made with the objects of the API server."""
    sections = sections_of(case, files_of(tables), with_objects=False)
    document = json.dumps({**json.loads(objects_of(load_case(case))), "config": ""}).encode()
    path = tmp_path / "node.tar.gz"
    path.write_bytes(written([*sections, section(OBJECTS, document)]))
    return path


@pytest.mark.parametrize(
    "case",
    ["nodeport", "masquerade-all", "detect-bridge", "dual-stack", "nodeport-addresses", "random-7-003"],
)
def test_unknown_settings_are_inferred_from_the_rules(case: str, tmp_path: Path) -> None:
    path = without_config(tmp_path, case, saved(case))
    result = invoke(diff, "--bundle", path, "-o", "json")
    assert (result.exit_code, json.loads(result.stdout)["nodes"][0]["rules"]["ports"]) == (0, [])
    assert invoke(diff, "--bundle", path, "--meaning").exit_code == 0
    assert "settings are inferred from its rules" in " ".join(result.stderr.split())
    assert (
        json.loads(result.stdout)["nodes"][0]["after"]
        == f"objects in {path} with settings inferred from the rules"
    )


def test_wrong_endpoint_is_found_with_inferred_settings(tmp_path: Path) -> None:
    stale = {it: text.replace("10.244.1.11", "10.244.1.99") for it, text in saved("nodeport").items()}
    path = without_config(tmp_path, "nodeport", stale)
    for options in ((), ("--meaning",)):
        result = invoke(diff, "--bundle", path, *options)
        assert (result.exit_code, "10.244.1.99" in result.stdout) == (1, True)


def test_given_settings_come_before_inferred_ones(tmp_path: Path) -> None:
    path, config = without_config(tmp_path, "nodeport", saved("nodeport")), tmp_path / "config.json"
    settings = load_case("nodeport")["config"]
    config.write_text(json.dumps(settings))
    result = invoke(diff, "--bundle", path, "--config", config)
    assert (result.exit_code, result.stdout, "inferred" in result.stderr) == (0, "", False)
    config.write_text(json.dumps({**settings, "iptables": {"masqueradeAll": True}}))
    assert invoke(diff, "--bundle", path, "--config", config).exit_code == 1
    assert invoke(explain, "web", "--bundle", path).exit_code == 0


def test_objects_of_an_api_server_keep_the_settings_of_the_bundle(
    write_bundle: WriteBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--kubeconfig and --hostname-override say nothing about how rules are made."""
    path = write_bundle("masquerade-all")
    known = bundle_objects(open_bundle(path))

    def on_server(config: Config, settings: str) -> KnownObjects:
        return msgspec.structs.replace(known, title=titled("API server", settings), config=config)

    monkeypatch.setattr("pykubeproxy.cli.diff.objects_on_server", on_server)
    result = invoke(diff, "--bundle", path, "--kubeconfig", "admin.conf", "-o", "json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["nodes"][0]["after"] == f"API server with the configuration in {path}"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("node", "addresses"), ["x\x1b[31m"]),
        (("node", "pod_cidrs"), ["10.0.0.0/99"]),
        (("services", 0, "cluster_ips"), ["$(x)"]),
        (("services", 0, "source_ranges"), ["x"]),
        (("services", 0, "ports", 0, "node_port"), -1),
        (("slices", 0, "endpoints", 0, "address"), "::x"),
    ],
)
def test_objects_with_invalid_values_are_an_error(
    place: tuple[str | int, ...], value: object, tmp_path: Path
) -> None:
    """Anybody may have written the bundle."""
    document = json.loads(objects_of(load_case("nodeport")))
    *path, last = place
    at = document["objects"]
    for step in path:
        at = at[step]
    at[last] = value
    file = tmp_path / "node.tar.gz"
    sections = sections_of("nodeport", files_of(saved("nodeport")), with_objects=False)
    file.write_bytes(written([*sections, section(OBJECTS, json.dumps(document).encode())]))
    for options in ((), ("--meaning",)):
        result = invoke(diff, "--bundle", file, *options)
        assert result.exit_code == 2
        assert f"cannot read the objects in {file}" in result.stderr


def test_explain_answers_from_the_objects(bundle: str) -> None:
    result = invoke(explain, "ns1/web", "--bundle", bundle)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "10.244.1.11:8080" in result.stdout
    result = invoke(explain, "ns1/nothing", "--bundle", bundle)
    assert f"{bundle} has no Service ns1/nothing" in result.stderr


def test_explain_infers_settings_from_the_rules(tmp_path: Path) -> None:
    result = invoke(explain, "ns1/web", "--bundle", without_config(tmp_path, "nodeport", saved("nodeport")))
    assert (result.exit_code, "settings are inferred from its rules" in result.stderr) == (0, True)
    assert "traffic from 10.244.0.0/16 keeps the client's address" in " ".join(result.stdout.split())


def test_explain_counts_the_services_that_come_first_for_affinity(tmp_path: Path) -> None:
    """They are in the bundle, too: of equal age, the first name comes first."""
    document = json.loads(objects_of(load_case("affinity")))
    objects = document["objects"]
    (web,) = (it for it in objects["services"] if it["name"] == "web")
    (slice_,) = (it for it in objects["slices"] if it["service"] == "web")
    objects["services"].append({**web, "name": "first", "created": web["created"]})
    objects["slices"].append({**slice_, "name": "first-1", "service": "first"})
    lists = len(slice_["endpoints"]) * len(slice_["ports"])
    document["config"] = document["config"].rstrip() + f"\npykubeproxy:\n  maxAffinityLists: {lists}\n"
    file = tmp_path / "node.tar.gz"
    sections = sections_of("affinity", files_of(saved("affinity")), with_objects=False)
    file.write_bytes(written([*sections, section(OBJECTS, json.dumps(document).encode())]))
    kept, unkept = (invoke(explain, f"ns1/{it}", "--bundle", file).stdout for it in ("first", "web"))
    assert "A client keeps its endpoint" in kept
    assert "Session affinity is not kept" in unkept
    assert "ns1/first" not in unkept


def test_status_is_that_of_the_agent(tmp_path: Path) -> None:
    agent = AgentStatus(
        version="1.2.3", node="node1", backend="nft", started=1.0, now=100.0,
        healthy=False, ready=True, alive=True, node_eligible=True, families=(),
    )  # fmt: skip
    path = tmp_path / "node.tar.gz"
    path.write_bytes(written([section(STATUS, encode(agent))]))
    result = invoke(status, "--bundle", path)
    words = " ".join(result.stdout.split())
    assert result.exit_code == 1
    assert words.startswith(
        f"From {path}, saved at 1970-01-01 00:01:40 UTC. node1 1.2.3, backend nft, up 1 min"
    )
    assert json.loads(invoke(status, "--bundle", path, "-o", "json").stdout)["nodes"][0]["node"] == "node1"
    path.write_bytes(written([section(STATUS, encode(agent).replace(b"node1", "n\x9b\u202e".encode()))]))
    assert (
        r'"n\u009b\u202e"' in invoke(status, "--bundle", path, "-o", "json").stdout
    )  # JSON on a terminal, too
    path.write_bytes(written([failing(STATUS, OSError("no agent answers"))]))
    assert "has no status of an agent (no agent answers)" in invoke(status, "--bundle", path).stderr


def test_bundle_without_root_has_no_rules(tmp_path: Path) -> None:
    """The reason is in the bundle."""
    path = tmp_path / "node.tar.gz"
    refused = [failing(name, PermissionError("Permission denied")) for name in files_of(saved("nodeport"))]
    path.write_bytes(written(refused))
    result = invoke(dump_rules, "--bundle", path)
    assert result.exit_code > 0
    assert "as root on the node (Permission denied)" in result.stderr


def test_rules_of_the_other_backend_are_named(tmp_path: Path) -> None:
    """As with --rules."""
    tables = saved("nodeport")
    old = {it: text.replace(" (nf_tables)", "").replace("ns1/web", "ns1/old") for it, text in tables.items()}
    path = tmp_path / "node.tar.gz"
    path.write_bytes(written(sections_of("nodeport", {**files_of(tables), **files_of(old, "legacy")})))
    result = invoke(dump_rules, "--bundle", path)
    assert "this shows the nft tables." in result.stderr
    assert "ns1/web" in result.stdout
    assert "ns1/old" in invoke(dump_rules, "--bundle", path, "--iptables-backend", "legacy").stdout
    empty = dict.fromkeys(files_of(old, "legacy"), "")
    path.write_bytes(written(sections_of("nodeport", {**files_of(tables), **empty})))
    result = invoke(dump_rules, "--bundle", path, "--iptables-backend", "legacy")
    assert "the bundle has no output of iptables-legacy-save" in result.stderr
    assert invoke(dump_rules, "--bundle", path).stderr == ""


def test_objects_of_another_version_are_an_error(tmp_path: Path) -> None:
    """Their form follows the program; the rules are read all the same."""
    path = tmp_path / "node.tar.gz"
    sections = [it for it in sections_of("nodeport", files_of(saved("nodeport"))) if it.name != OBJECTS]
    path.write_bytes(written([*sections, section(OBJECTS, b'{"apiVersion": "x", "version": "9.9"}')]))
    result = invoke(diff, "--bundle", path)
    assert result.exit_code == 2
    assert "its version is 9.9" in result.stderr
    assert "; use the pykubeproxy that made it, or add -f PATH" in result.stderr
    case = load_case("nodeport")
    objects = tmp_path / "objects.json"
    objects.write_text(
        json.dumps({"apiVersion": "v1", "kind": "List", "items": [*case["objects"], case["node"]]})
    )
    result = invoke(diff, "--bundle", path, "-f", objects)
    assert "settings are inferred from its rules" in " ".join(result.stderr.split())
    assert result.exit_code == 0
    assert "ns1/web" in invoke(dump_rules, "--bundle", path).stdout


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (dump_rules, ("--watch",), "--watch requires live rules"),
        (dump_rules, ("--rules", "-"), "--bundle cannot be combined with --rules"),
        (dump_rules, ("--bundle", "/nowhere"), "--bundle: cannot read /nowhere: No such file"),
        (dump_rules, ("--bundle", __file__), f"--bundle: {__file__} is no bundle"),
        (trace, (POD, "10.96.1.1:80", "--rules", "-"), "--bundle cannot be combined with --rules"),
        (diff, ("--against", "objects.yaml"), "--bundle cannot be combined with --against"),
        (diff, ("--rules", "rules.txt"), "--bundle cannot be combined with --rules"),
        (diff, ("--url", "http://127.0.0.1:1"), "--bundle cannot be combined with --url"),
        (explain, ("web", "-f", "-"), "--bundle cannot be combined with --url, -f"),
        (status, ("--url", "http://127.0.0.1:1"), "--bundle cannot be combined with --url"),
    ],
)
def test_wrong_use_is_an_error(
    bundle: str, command: click.Command, arguments: tuple[str, ...], message: str
) -> None:
    result = invoke(command, "--bundle", bundle, *arguments)
    assert (result.exit_code > 0, result.stdout) == (True, "")
    assert message in result.stderr
