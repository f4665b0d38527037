"""`kubectl pykubeproxy bundle`: the nodes of a cluster in files, from outside."""

from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from pykubeproxy.bundle.layout import FILES, FLOWS, METRICS, OBJECTS, TABLES
from pykubeproxy.bundle.read import Bundle, read_bundle
from pykubeproxy.cli.dump_rules import dump_rules
from pykubeproxy.cli.explain import explain
from pykubeproxy.cli.kubectl import plugin
from pykubeproxy.nodes import cluster as nodes_cluster
from pykubeproxy.nodes import saving
from tests.fakes.bundles import failing, section, written
from tests.fakes.cluster import service, slice_of
from tests.fakes.remote_nodes import AGENT, SERVING, RemoteNodes, saved

OURS = written([section(TABLES[0], SERVING.encode()), failing(TABLES[1], OSError("no IPv6"))], node="n2")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteNodes]:
    """A node with kube-proxy, one with our agent, and one with Cilium."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.chdir(tmp_path)
    with RemoteNodes(tmp_path) as running:
        running.pod("p1", "n1")
        running.saves("p1", "nft", SERVING)
        running.pod("p2", "n2", AGENT, container="agent", image="pykubeproxy:0.1.0")
        prints(tmp_path, "p2", OURS)
        running.pod("cilium-1", "n3", {"k8s-app": "cilium"})
        running.api.store.create(service("web", clusterIP="10.96.0.10", clusterIPs=["10.96.0.10"]))
        running.api.store.create(slice_of("web", "10.244.1.5"))
        yield running


def prints(folder: Path, pod: str, raw: bytes) -> None:
    """Make `pykubeproxy bundle` in a pod print these bytes."""
    file, program = folder / f"{pod}.raw", folder / "programs" / pod / "pykubeproxy"
    file.write_bytes(raw)
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\n[ "$*" = "bundle -o -" ] && exec /bin/cat {file}\n')
    program.chmod(0o700)


def invoke(*arguments: str, command: click.Command = plugin, code: int = 0) -> Result:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == code, result.output
    return result


def read(path: str) -> Bundle:
    with Path(path).open("rb") as file:
        return read_bundle(file, path)


def test_all_nodes_are_saved_in_a_folder(cluster: RemoteNodes) -> None:
    """A node with another proxy is no failure."""
    result = invoke("bundle", "-o", "out")
    ours, kube_proxy = sorted(map(read, result.stdout.split()), key=lambda it: it.manifest.proxy)
    assert sorted(map(str, Path("out").iterdir())) == sorted(result.stdout.split())
    assert Path(ours.name).read_bytes() == OURS
    assert (kube_proxy.manifest.node, kube_proxy.manifest.proxy) == ("n1", "kube-proxy v1.35.1")
    assert kube_proxy.files[TABLES[0]].decode() == saved("iptables-nft-save", SERVING)
    assert set(result.stderr.splitlines()) == {
        f"n1: no {TABLES[2]}: the image of pod kube-system/p1 has no iptables-legacy-save",
        f"n1: no {TABLES[3]}: the image of pod kube-system/p1 has no ip6tables-legacy-save",
        f"n2: no {TABLES[1]}: no IPv6",
        "n3: runs Cilium and no kube-proxy",
    }


def test_bundle_of_kube_proxy_answers_offline(cluster: RemoteNodes) -> None:
    path = invoke("bundle", "--node", "n1").stdout.strip()
    assert "10.244.1.5:8080  7 packets" in invoke("--bundle", path, command=dump_rules).stdout
    assert "10.244.1.5:" in invoke("web", "--bundle", path, command=explain).stdout


def test_flows_are_saved_on_request(cluster: RemoteNodes) -> None:
    """From a bundle of kube-proxy's pod, explain names the connection that stays on a removed endpoint."""
    flow = (
        "tcp 6 300 ESTABLISHED src=10.244.1.9 dst=10.96.0.10 sport=4000 dport=80"
        " src=10.244.1.6 dst=10.244.1.9 sport=8080 dport=4000 [ASSURED] mark=0 use=1\n"
    )
    cluster.program("p1", "conntrack", flow)
    path = invoke("bundle", "--node", "n1", "-o", "without").stdout.strip()
    assert FLOWS not in read(path).files
    path = invoke("bundle", "--node", "n1", "--flows").stdout.strip()
    explained = " ".join(invoke("web", "--bundle", path, command=explain).stdout.split())
    # The program prints this for each family.
    assert "2 connections stay on 10.244.1.6:8080, which no longer serves" in explained
    refused = invoke("bundle", "--node", "n2", "--flows", code=2)
    assert "`pykubeproxy bundle -o - --flows` in pod kube-system/p2 failed" in refused.stderr


def test_image_with_a_single_backend(cluster: RemoteNodes) -> None:
    cluster.pod("p4", "n4")
    cluster.saves("p4", "", SERVING)
    path = invoke("bundle", "--node", "n4").stdout.strip()
    assert "10.244.1.5:8080" in invoke("--bundle", path, command=dump_rules).stdout


def test_older_agent_is_read_as_kube_proxy_is(cluster: RemoteNodes) -> None:
    """The objects are those of the API server."""
    cluster.saves("p2", "nft", SERVING)
    cluster.program("p2", "pykubeproxy", errors="Error: No such command 'bundle'.\n", code=2)
    path = invoke("bundle", "--node", "n2").stdout.strip()
    assert read(path).manifest.proxy == "pykubeproxy 0.1.0"
    assert "10.244.1.5:" in invoke("web", "--bundle", path, command=explain).stdout


@pytest.mark.parametrize("raw", [OURS[:-9], b"", b"x" * 600])
def test_damaged_bundle_is_not_kept(cluster: RemoteNodes, tmp_path: Path, raw: bytes) -> None:
    prints(tmp_path, "p2", raw)
    result = invoke("bundle", "--node", "n2", "-o", "out", code=2)
    assert "n2: the bundle of pod kube-system/p2 is " in result.stderr
    assert list(Path("out").iterdir()) == []


def test_agent_that_fails_is_named(cluster: RemoteNodes) -> None:
    cluster.program("p2", "pykubeproxy", errors="Error: out of memory\n", code=1)
    result = invoke("bundle", "--node", "n2", code=2)
    assert "n2: `pykubeproxy bundle -o -` in pod kube-system/p2 failed: Error: out of memory" in result.stderr


def test_pod_without_programs_is_named(cluster: RemoteNodes) -> None:
    cluster.pod("p4", "n4")
    result = invoke("bundle", "--node", "n4", code=2)
    assert "n4: the image of pod kube-system/p4 has no iptables-save; use --debug-image" in result.stderr
    assert not list(Path().glob("*.gz"))


def test_silent_pod_is_asked_once(
    cluster: RemoteNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kubelet hangs, other programs would be silent too."""
    program, asked = tmp_path / "programs" / "p1" / "iptables-nft-save", tmp_path / "asked"
    program.write_text(f"#!/bin/sh\necho >> {asked}\nexec /bin/sleep 60\n")
    monkeypatch.setattr(saving, "_SILENCE", 1.0)
    result = invoke("bundle", "--node", "n1", code=2)
    assert result.stderr == "n1: iptables-nft-save in pod kube-system/p1 wrote nothing for 1 s\n"
    assert asked.read_text() == "\n"


def test_interrupted_command_leaves_no_files(cluster: RemoteNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that write bundles are abandoned on Ctrl-C."""

    def half(
        _access: object, _proxies: object, _objects: object, target: Callable[[str], Path], _: object
    ) -> None:
        target("half").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(saving, "save_node", half)
    monkeypatch.setattr(nodes_cluster, "on_each_node", lambda save, nodes, *_: [save(it) for it in nodes])
    CliRunner().invoke(plugin, ["bundle", "-o", "out"])
    assert list(Path("out").iterdir()) == []


def test_debug_pod_makes_the_bundle(cluster: RemoteNodes, tmp_path: Path) -> None:
    """Where the pod of the proxy cannot."""
    cluster.pod("p4", "n4")
    prints(tmp_path, "debug", OURS)
    path = invoke("bundle", "--node", "n4", "--debug-image", "x").stdout.strip()
    bundle = read(path)
    assert cluster.debug_pods() == []
    assert (bundle.manifest.node, bundle.manifest.proxy) == ("n4", "kube-proxy v1.35.1")
    assert bundle.files[TABLES[0]] == SERVING.encode()
    assert bundle.why_missing(TABLES[1]) == "no IPv6"


def test_debug_pod_gets_the_objects_of_the_api_server(cluster: RemoteNodes, tmp_path: Path) -> None:
    """It has no agent to ask. All other files stay."""
    cluster.pod("p4", "n4")
    refused = failing(OBJECTS, OSError("no agent answers"))
    raw = written([section(TABLES[0], SERVING.encode()), section(METRICS, b"x 1\n"), refused])
    prints(tmp_path, "debug", raw)
    result = invoke("bundle", "--node", "n4", "--debug-image", "x")
    path = result.stdout.strip()
    assert "no agent answers" not in result.stderr
    assert "10.244.1.5:" in invoke("web", "--bundle", path, command=explain).stdout
    with Path(path).open("rb") as file:
        assert read_bundle(file, path, FILES).files[METRICS] == b"x 1\n"
