"""What a bundle of this node has, and that it has no secrets."""

import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from pykubeproxy import http
from pykubeproxy.agent.observe.handlers import metrics_pages
from pykubeproxy.bundle import layout, sections
from pykubeproxy.bundle.layout import FILES, MANIFEST, OBJECTS, tables_file
from pykubeproxy.bundle.read import read_bundle
from pykubeproxy.bundle.sections import agent_sections, node_sections
from pykubeproxy.bundle.write import collected
from pykubeproxy.config import load
from pykubeproxy.kernel import Failed, NotPermitted, Runner
from pykubeproxy.kernel.conntrack import ConntrackCounts
from pykubeproxy.nodes.agent import NoAgent, fetch
from pykubeproxy.objects import EndpointSlice, Family, Kind, Node, Service, decode
from pykubeproxy.pages.servicez import NodeObjects
from pykubeproxy.pages.statusz import AgentStatus, SyncRecord, Unwatched
from tests.fakes.bundles import written
from tests.unit.agent.conftest import Serve, serve

__all__ = ["serve"]

SECRET = "hunter2"
# Stand-ins for iptables and nft; `iptables-legacy-save` fails.
SCRIPT = f"""#!/bin/sh
case "$0 $*" in
*ip6tables-legacy-save*) echo "cannot reach https://root:{SECRET}@x/" >&2; exit 3;;
*legacy*--version) echo "iptables v1.8.9 (legacy)";;
*iptables-nft*--version|*ip6tables-nft*--version) echo "iptables v1.8.9 (nf_tables)";;
*nft*--version) echo "nftables v1.0.6";;
*list*) echo "Operation not permitted (you must be root)" >&2; exit 1;;
*-save*) printf '%s\\n' '*nat' '-A X -m comment --comment "see http://root:{SECRET}@x/" -j Y' COMMIT;;
esac
"""
PROGRAMS = [
    f"{name}-{backend}{end}"
    for name in ("iptables", "ip6tables")
    for backend in ("nft", "legacy")
    for end in ("", "-save", "-restore")
]


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    """Run the stand-ins only."""
    for name in (*PROGRAMS, "nft"):
        path = tmp_path / name
        path.write_text(SCRIPT)
        path.chmod(0o755)
    return Runner(environment={"PATH": f"{tmp_path}:/usr/bin:/bin"})


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for netlink."""
    monkeypatch.setattr(sections, "local_addresses", lambda family: ())
    monkeypatch.setattr(sections, "interfaces", lambda: ())
    monkeypatch.setattr(sections, "all_routes", lambda family: ())
    monkeypatch.setattr(sections, "routing_rules", lambda family: ())
    counts = ConntrackCounts(Counter({("tcp", "TIME_WAIT"): 2}), Counter())
    monkeypatch.setattr(sections, "count_entries", lambda family: counts)


def texts(raw: bytes) -> dict[str, str]:
    """All files of a bundle by name."""
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        return {it.name.rpartition("/")[2]: tar.extractfile(it).read().decode() for it in tar}  # type: ignore[union-attr]


def annotated(kind: Kind, fields: dict[str, object], labels: dict[str, str] | None = None) -> object:
    """An object with secrets wherever users write text."""
    last = json.dumps({"data": SECRET})
    metadata = {
        "namespace": "ns",
        "name": "web",
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": last, "token": SECRET},
        "labels": {"note": SECRET, **(labels or {})},
        "managedFields": [{"manager": SECRET}],
    }
    return decode(kind, json.dumps({"metadata": metadata, "status": {"message": SECRET}, **fields}).encode())


def agent(serve: Serve, folder: Path) -> str:
    """An agent whose files, flags, environment and objects have secrets; return its URL."""
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(json.dumps({"users": [{"name": "x", "user": {"token": SECRET}}]}))
    flags = {"kubeconfig": str(kubeconfig), "master": f"https://root:{SECRET}@api/"}
    service = annotated(Kind.SERVICE, {"spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}})
    slice_ = annotated(
        Kind.ENDPOINT_SLICE,
        {
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["10.0.0.1"], "deprecatedTopology": {"x": SECRET}}],
        },
        {"kubernetes.io/service-name": "web"},
    )
    node = annotated(Kind.NODE, {})
    assert isinstance(service, Service) and isinstance(slice_, EndpointSlice) and isinstance(node, Node)
    objects = NodeObjects(node, (service,), (slice_,))
    failure = f"cannot connect through http://root:{SECRET}@proxy:3128: refused"
    status = AgentStatus(
        version="1", node="n", backend="nft", started=1.0, now=2.0, healthy=True, ready=True, alive=True,
        node_eligible=True, families=(), unwatched=(Unwatched("Service", 1.0, failure),),
        syncs=(SyncRecord(1.0, "IPv4", True, 1.0, 0, failure),),
    )  # fmt: skip
    page = metrics_pages(
        lambda: http.text(f"# HELP x http://root:{SECRET}@x/\nx 1\n"),
        load(None, flags).config,
        flags,
        lambda _: status,
        lambda _, __: objects,
    )
    return f"http://127.0.0.1:{serve(page)}"


def test_bundle_has_no_secrets(
    serve: Serve, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are planted in rules, messages, objects, files and the environment."""
    monkeypatch.setenv("HTTPS_PROXY", f"http://root:{SECRET}@proxy:3128")
    url = agent(serve, tmp_path)
    pages = agent_sections(url, lambda page, query: fetch(url, page, **query))
    raw = written([*node_sections(runner, tmp_path), *pages])
    found = texts(raw)
    assert [name for name, text in found.items() if SECRET in text] == []
    missing = {it.name for it in read_bundle(io.BytesIO(raw), "b").manifest.files if it.error}
    assert missing == {tables_file(Family.IPV6, "legacy"), layout.NFT_RULESET}
    # The places with secrets are there.
    assert '--comment "see http://x/"' in found[tables_file(Family.IPV4, "nft")]
    assert "kubeconfig" in found[layout.CONFIGURATION]
    assert "through http://proxy:3128" in found[layout.STATUS]
    assert '"web"' in found[OBJECTS]


def test_every_file_is_documented_and_in_order(serve: Serve, runner: Runner, tmp_path: Path) -> None:
    sections = node_sections(runner, with_flows=True)
    made = [it.name for it in (*sections, *agent_sections("http://x", lambda *_: b""))]
    of_node = [name for name in FILES if name not in (MANIFEST, "iptables-save.txt", "ip6tables-save.txt")]
    assert made == of_node


def test_failures_are_in_the_manifest(runner: Runner, tmp_path: Path) -> None:
    def no_agent(page: str, query: dict[str, str]) -> bytes:
        raise NoAgent("cannot reach an agent")

    every = [*node_sections(runner, tmp_path), *agent_sections("http://x", no_agent)]
    bundle = read_bundle(io.BytesIO(written(every)), "b")
    assert bundle.why_missing(OBJECTS) == "cannot reach an agent"
    refused = NotPermitted("nft", "Operation not permitted")
    assert bundle.why_missing(layout.NFT_RULESET) == str(refused)
    failed = Failed("ip6tables-legacy-save", 3, "cannot reach https://x/")
    assert bundle.why_missing(tables_file(Family.IPV6, "legacy")).startswith(str(failed)[:40])


def test_other_server_at_the_address_of_the_agent_is_recorded() -> None:
    """kube-proxy answers there too, with text."""
    bundle = read_bundle(
        io.BytesIO(written(agent_sections("http://x", lambda *_: b"kube-proxy statusz"))), "b"
    )
    assert "is not JSON" in bundle.why_missing(OBJECTS)
    assert bundle.manifest.files[-1].error == ""  # metrics


def test_settings_are_printed_as_sysctl_does(tmp_path: Path, runner: Runner) -> None:
    for name, value in {
        "net/ipv4/ip_forward": "1\n",
        "net/ipv4/conf/eth0.1/rp_filter": "2\n",
        "net/netfilter/nf_conntrack_max": "262144\n",
        "net/ipv4/ip_local_port_range": "32768\t60999\n",
        "net/ipv6/conf/all/stable_secret": SECRET,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(value)
    lines = texts(written(node_sections(runner, tmp_path)))[layout.SYSCTLS].splitlines()
    assert lines == [
        "net.ipv4.conf.eth0/1.rp_filter = 2",
        "net.ipv4.ip_forward = 1",
        "net.ipv4.ip_local_port_range = 32768 60999",
        "net.netfilter.nf_conntrack_max = 262144",
    ]


def test_connections_are_counted_for_the_busiest_services(
    monkeypatch: pytest.MonkeyPatch, runner: Runner
) -> None:
    destinations = {("tcp", f"10.0.0.{n}:80", replied): n for n in range(200) for replied in (True, False)}
    monkeypatch.setattr(
        sections,
        "count_entries",
        lambda _: ConntrackCounts(Counter({("tcp", "SYN_SENT"): 3}), Counter(destinations)),
    )
    (section,) = [it for it in node_sections(runner) if it.name == layout.CONNTRACK]
    counts = json.loads(texts(written([section]))[layout.CONNTRACK])["IPv4"]
    assert counts["states"] == [{"protocol": "tcp", "state": "SYN_SENT", "entries": 3}]
    assert len(counts["services"]) == 100
    assert counts["services"][0] == {
        "protocol": "tcp", "destination": "10.0.0.199:80", "entries": 398, "unreplied": 199,
    }  # fmt: skip


def test_command_that_prints_too_much_is_killed(runner: Runner, tmp_path: Path) -> None:
    script = tmp_path / "nft"
    script.write_text("#!/bin/sh\nexec yes 'a rule of nft'\n")
    (section,) = [it for it in node_sections(runner) if it.name == layout.NFT_RULESET]
    (member,) = collected([section], 1 << 20)
    assert (member.file.error, member.packed) == ("it has more than 1 MiB", b"")
