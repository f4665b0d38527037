"""Hand over a running node from kube-proxy to pykubeproxy and back."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from pykubeproxy.kernel import Backend, Iptables, open_iptables
from pykubeproxy.lab.prober import Target
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey
from tests.cases import as_restore_input, comparable, load_case
from tests.fakes.follower import eventually
from tests.fakes.kube_proxy import without_unknown
from tests.fakes.process import HEALTH, answers, inside_a_namespace, running
from tests.fakes.traffic import Traffic, TrafficRoute, echo_command

pytestmark = pytest.mark.root

NODE = "192.168.99.10"
WEB = TrafficRoute("cluster IP", Target("10.96.1.1", 80))
# By case: connections, and how our agent ends.
CASES = {
    "nodeport": ([WEB, TrafficRoute("node port", Target(NODE, 30080))], "terminate"),
    "affinity": ([WEB._replace(affine=True)], "kill"),
}


class KubeProxy:
    """Writes the recorded rules of a case like kube-proxy: filter and nat in one restore."""

    def __init__(self, case: str, tables: Iptables) -> None:
        self._case, self._tables = case, tables

    def start(self) -> None:
        """Write the rules; existing jumps stay, chains of unknown Services are deleted."""
        nat = self._tables.save(["nat"]).chains
        jumps = not nat.get(ChainKey("nat", "PREROUTING"))
        text = as_restore_input(self._case, Family.IPV4, jumps=jumps)
        head, _, rest = text.partition("*nat\n")
        body, _, end = rest.rpartition("COMMIT\n")
        lines = without_unknown(body.splitlines(), nat)
        self._tables.restore("\n".join([f"{head}*nat", *lines, f"COMMIT\n{end}"]))

    def is_in_force(self) -> bool:
        """Return whether filter and nat equal kube-proxy's."""
        recorded_input = as_restore_input(self._case, Family.IPV4)
        live = comparable(self._tables.save(["filter", "nat"]))
        rules = {f"-A {key.chain} {rule}" for key, rules in live.items() for rule in rules}
        return rules == {line for line in recorded_input.splitlines() if line.startswith("-A")}


def agent_flags(case: str, tables: Iptables, folder: Path) -> tuple[str, ...]:
    """Return flags for an agent with the configuration and the objects of a case, which dispatches by a tree."""
    document = load_case(case)
    settings = {"iptablesBackend": tables.backend.value, "dispatch": "tree"}
    (folder / "config").write_text(yaml.safe_dump(document["config"] | {"pykubeproxy": settings}))
    items = [*document["objects"], document["node"]]
    (folder / "objects.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    return f"--config={folder}/config", f"--manifests={folder}/objects.json"


@pytest.fixture(params=["nft", "legacy"])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Iptables]:
    """The tables of a node with the pods of the cases, in one namespace with the test."""
    with ExitStack() as stack:
        stack.enter_context(inside_a_namespace())
        os.environ["XTABLES_LOCKFILE"] = str(tmp_path / "lock")
        stack.callback(os.environ.pop, "XTABLES_LOCKFILE")
        subprocess.run(["ip", "addr", "add", f"{NODE}/32", "dev", "lo"], check=True)
        subprocess.run(["ip", "route", "add", "10.96.0.0/16", "dev", "lo"], check=True)
        for number, address in enumerate(("10.244.1.11", "10.244.2.12", "10.244.3.13")):
            subprocess.run(["ip", "addr", "add", f"{address}/32", "dev", "lo"], check=True)
            pod = subprocess.Popen(echo_command(f"pod{number}", address), stdout=subprocess.PIPE)
            stack.callback(pod.wait)
            stack.callback(pod.kill)
            assert pod.stdout
            assert pod.stdout.readline() == b"ready\n"
        yield open_iptables(Backend(request.param), Family.IPV4)


@pytest.mark.parametrize("case", CASES)
def test_no_connection_fails_during_handovers(tables: Iptables, case: str, tmp_path: Path) -> None:
    """Whether our agent is stopped or killed; none of our chains remain."""
    ways, end = CASES[case]
    flags = agent_flags(case, tables, tmp_path)
    kube_proxy = KubeProxy(case, tables)
    kube_proxy.start()
    assert kube_proxy.is_in_force()
    with Traffic(ways) as traffic:
        with running(tmp_path / "log", *flags) as agent:
            eventually(lambda: answers(HEALTH, "/readyz", 200), 30)
            assert not kube_proxy.is_in_force()  # kube-proxy has no dispatch tree
            before = traffic.total()
            eventually(lambda: traffic.total() > before + 40)
            getattr(agent, end)()
            agent.wait(10)
        kube_proxy.start()
        assert kube_proxy.is_in_force()
        after = traffic.total()
        eventually(lambda: traffic.total() > after + 40)
    print(traffic)
    assert not traffic.failures()
