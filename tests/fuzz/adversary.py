"""Run a tenant who changes Services and EndpointSlices at random beside a victim: `python -m tests.fuzz.adversary`.

Half of the time goes to the agent's core with tables in memory, the other half to whole agents on real tables of both
backends, which needs root. After each batch of steps, the victim's rules must be right. A failing sequence is saved in
tests/data/adversary, and `make test` repeats it from then on.
"""

import argparse
import hashlib
import itertools
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import structlog
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pykubeproxy.agent import pending
from pykubeproxy.agent.tables import FamilyTables
from pykubeproxy.config import load
from pykubeproxy.kernel import Backend
from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, SERVICES, ApiError, Store
from pykubeproxy.objects import Event, Family, Key, Kind, Node
from pykubeproxy.rules.context import KernelFacts, RuleContext, rule_context
from pykubeproxy.rules.iptables_save import without_comment
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.sources.tracker import ObjectTracker
from tests.fakes.iptables import FakeIptables
from tests.fuzz import hostile_steps as hostile
from tests.fuzz.hostile_steps import Step
from tests.fuzz.judge import Claim, RealAgent, claims, problems

CASES = Path(__file__).parents[1] / "data" / "adversary"
NODE = "node1"
# How often the victim changes during and after a batch of steps.
_ROUNDS = 5
# The most seconds of one sync in memory, for objects of scale LARGE.
_SYNC_SECONDS = 20.0

Sequence = list[list[Step]]


class Writer:
    """Apply steps to a store, as an API server does. `ready` are the victim's ready endpoints, `done` counts steps."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.ready = dict.fromkeys(Family, 1)
        self.done = self.refused = 0
        store.create(hostile.victim_service())
        for family in Family:
            store.create(hostile.victim_slice(family, 1))

    def step(self, step: Step) -> bool:
        """Return whether the server accepts a step."""
        item = step.item
        resource = SERVICES if item["kind"] == "Service" else ENDPOINT_SLICES
        namespace, name = item["metadata"]["namespace"], item["metadata"]["name"]
        try:
            if step.do == "delete":
                self.store.delete(resource, namespace, name)
            else:
                self._write(item)
        except ApiError:
            self.refused += 1
            return False
        self.done += 1
        if (namespace, name[:7]) == ("default", "victim-") and resource is ENDPOINT_SLICES:
            self._note_victim(item)
        return True

    def claims(self) -> frozenset[Claim]:
        return claims(self.store.list(SERVICES))

    def _write(self, item: hostile.Json) -> None:
        try:
            self.store.create(item)
        except ApiError as error:
            if error.code != 409:
                raise
            self.store.replace(item)

    def _note_victim(self, item: hostile.Json) -> None:
        if item["metadata"]["labels"].get("kubernetes.io/service-name") == "victim":
            ready = [entry for entry in item["endpoints"] if entry["conditions"]["ready"]]
            self.ready[Family(item["addressType"])] = len(ready)


def context(family: Family, dispatch: str = "auto") -> RuleContext:
    """Return the rule context of a node with addresses of both families."""
    document = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clusterCIDR": "10.244.0.0/16,fd00:10:244::/56",
        "pykubeproxy": {"dispatch": dispatch},
    }
    addresses = tuple(hostile.NODE_IP.values())
    node = Node(NODE, addresses, ("10.244.1.0/24", "fd00:10:244:1::/64"))
    return rule_context(load(document, {}).config, NODE, node, KernelFacts(addresses, nfacct=False), family)


class Core:
    """The agent's core, from JSON objects to tables in memory, of both families."""

    def __init__(self, backend: Backend, dispatch: str) -> None:
        self.writer = Writer(Store())
        self.cluster = Cluster()
        self.trackers = {
            SERVICES: ObjectTracker(Kind.SERVICE),
            ENDPOINT_SLICES: ObjectTracker(Kind.ENDPOINT_SLICE),
        }
        self.live = {family: FakeIptables(backend, family) for family in Family}
        limit = 200 if backend is Backend.NFT else None
        self.tables = {family: FamilyTables(live, limit) for family, live in self.live.items()}
        self._dispatch = dispatch
        self._deliver([hostile.victim_service(), *(hostile.victim_slice(family, 1) for family in Family)])

    def batch(self, steps: list[Step]) -> None:
        """Apply steps, sync, and assert that the victim is served."""
        self._deliver([step.item for step in steps if self.writer.step(step)])

    def assert_equal_to_a_fresh_start(self) -> None:
        """An agent that starts now writes the same rules, once all large Services had their turn."""
        for family in Family:
            fresh = FakeIptables(self.live[family].backend, family)
            tables = FamilyTables(fresh, None)
            tables.sync(self.cluster, context(family, self._dispatch))
            while tables.waiting:
                tables.sync(self.cluster, context(family, self._dispatch), pending.Work.TURN)
            expected, found = map(_without_comments, (fresh.save().chains, self.live[family].save().chains))
            assert found == expected, sorted(
                key for key in {*found, *expected} if found.get(key) != expected.get(key)
            )

    def _deliver(self, items: list[hostile.Json]) -> None:
        changed: dict[Key, bool] = {}
        for item in items:
            if event := self._event(item):
                changed |= {key: change.loses for key, change in self.cluster.apply(event).items()}
        claimed = self.writer.claims()
        for family, tables in self.tables.items():
            begun = time.monotonic()
            tables.pending.changed(changed)
            report = tables.sync(self.cluster, context(family, self._dispatch))
            assert time.monotonic() - begun < _SYNC_SECONDS
            assert not report.rejected_tree
            assert hostile.VICTIM not in {(entry.namespace, entry.name) for entry in report.quarantined}
            # Until its turn, a large Service keeps addresses that it no longer claims.
            while tables.waiting:
                tables.sync(self.cluster, context(family, self._dispatch), pending.Work.TURN)
            found = list(problems(self.live[family].save(), self.writer.ready[family], claimed))
            assert not found, "\n".join(found)

    def _event(self, item: hostile.Json) -> Event | None:
        """Return the event of a watch for an object as it is in the store now."""
        resource = SERVICES if item["kind"] == "Service" else ENDPOINT_SLICES
        key = Key(item["metadata"]["namespace"], item["metadata"]["name"])
        tracker = self.trackers[resource]
        try:
            stored = self.writer.store.read(resource, *key)
        except ApiError:
            return tracker.deleted(key)
        return tracker.updated(msgspec.Raw(stored.body), key)


def _without_comments(chains: Mapping[ChainKey, tuple[str, ...]]) -> dict[ChainKey, tuple[str, ...]]:
    """Return chains without comments: those that do not change keep theirs when a cluster gets large."""
    return {key: tuple(map(without_comment, rules)) for key, rules in chains.items()}


def run_core(sequence: Sequence, backend: Backend, dispatch: str) -> Writer:
    """Play a sequence on the core; assert that the victim is served after each batch."""
    core = Core(backend, dispatch)
    for steps in sequence:
        core.batch(steps)
    core.assert_equal_to_a_fresh_start()
    return core.writer


def load_case(path: Path) -> Sequence:
    """Return a saved sequence."""
    return msgspec.json.decode(path.read_bytes(), type=Sequence)


def run_agent(sequence: Sequence, backend: Backend) -> Writer:
    """Play a sequence on an agent process with real tables, while the victim changes all the time.

    Assert that the victim hardly waits, that the agent stays healthy and modest, and that a new one starts.
    """
    with tempfile.TemporaryDirectory() as folder, RealAgent(backend, Path(folder)).running() as agent:
        writer = Writer(agent.store)
        with agent.started():
            agent.assert_served(writer.ready, frozenset())
            turns = itertools.count(1)

            def change() -> None:
                number = next(turns)
                for family in Family:
                    writer.step(Step("write", hostile.victim_slice(family, 1 + number % 3)))

            for _ in range(_ROUNDS):
                agent.delay(change, writer.ready, frozenset())
            agent.note_undisturbed()
            # Until its turn, a large Service keeps addresses that it no longer claims.
            claimed = frozenset[Claim]()
            for steps in sequence:
                claimed |= claims(
                    entry.item for entry in steps if entry.do == "write" and entry.item["kind"] == "Service"
                )
                tenant = threading.Thread(target=lambda: [*map(writer.step, steps)])
                tenant.start()
                rounds = 0
                while tenant.is_alive() or rounds < _ROUNDS:
                    agent.disturbed(agent.delay(change, writer.ready, claimed))
                    rounds += 1
                tenant.join()
            agent.assert_served(writer.ready, writer.claims())
            agent.assert_modest()
        with agent.started():
            agent.delay(change, writer.ready, writer.claims())
            agent.assert_healthy()
    return writer


def main() -> int:
    """Return 1 if a sequence fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.adversary", description=__doc__)
    parser.add_argument("--seconds", type=float, default=180, help="total seconds (default: 180)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="seed for hypothesis")
    parser.add_argument("--move", choices=sorted(hostile.MOVES), help="only this move, once")
    parser.add_argument(
        "--backend", choices=[entry.value for entry in Backend], help="with --move: not on both"
    )
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))  # errors only
    if options.move:
        return max(_move(options.move, entry) for entry in Backend if options.backend in (None, entry.value))
    dispatches = itertools.cycle(["auto", "tree"])
    runs: dict[str, Callable[[Sequence, Backend], Writer]] = {
        "core": lambda sequence, backend: run_core(sequence, backend, next(dispatches))
    }
    if os.geteuid() == 0:
        runs["agent"] = run_agent
    else:
        print("whole agents need root: left out", flush=True)
    print(f"seed {options.seed}", flush=True)
    return max(_repeat(name, run, options.seconds / len(runs), options.seed) for name, run in runs.items())


def _move(name: str, backend: Backend) -> int:
    try:
        run_agent(hostile.MOVES[name](hostile.LARGE), backend)
    except Exception as error:
        print(f"{name}, {backend.value}: {error}", flush=True)
        return 1
    print(f"{name}, {backend.value}: passed", flush=True)
    return 0


def _repeat(name: str, run: Callable[[Sequence, Backend], Writer], seconds: float, first: int) -> int:
    begun, counts = time.monotonic(), [0, 0, 0]
    last: list[Sequence] = []

    def body(sequence: Sequence, backend: Backend) -> None:
        last[:] = [sequence]
        if time.monotonic() - begun < seconds:
            writer = run(sequence, backend)
            for index, count in enumerate((1, writer.done, writer.refused)):
                counts[index] += count

    for number in itertools.count(first):
        if time.monotonic() - begun >= seconds:
            break
        test = settings(
            max_examples=20,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            # Shrinking takes a run for each try; the sequence is saved whole.
            phases=[Phase.generate],
        )(seed(number)(given(hostile.sequences(hostile.LARGE, 8), st.sampled_from(Backend))(body)))
        try:
            test()
        except Exception:
            traceback.print_exc()
            print(f"{name}: failed with --seed {number}, sequence saved as {_save(last[0])}", flush=True)
            return 1
    sequences, done, refused = counts
    print(
        f"{name}: {sequences} sequences, {done} steps, {refused} more refused by the API server", flush=True
    )
    return 0


def _save(sequence: Sequence) -> Path:
    CASES.mkdir(exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(sequence))
    path = CASES / f"{hashlib.sha256(text).hexdigest()[:12]}.json"
    path.write_bytes(text)
    return path


if __name__ == "__main__":
    sys.exit(main())
