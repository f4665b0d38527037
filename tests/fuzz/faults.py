"""Break a lab at random, and judge what `trace --live` says: `python -m tests.fuzz.faults [--runs N] [--seed S]`.

Each run makes none, one or two of the faults of `lab break`, beside traffic and rules that do not matter. The answer must
name a fault that the probes meet, or say what it cannot tell. Needs root and kubectl.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pykubeproxy.lab.agents import KubeProxyBinary, kube_proxy_binary
from pykubeproxy.lab.cluster import Lab, LabService
from pykubeproxy.lab.faults import APP, FAULTS, NARROW, break_lab, mend
from tests.fakes.kubectl import kubectl

COUNT = 20
# Until the proxies have synced a change.
_SYNC_SECONDS = 1.5
_SIZE = 2 * NARROW
_NODE_OF = {"client-1": "node1", "client-2": "node2", "outside": "node1"}
_DROPS = ("iptables", "nftables")
# What happens to probes whatever else stops them: the rules say so.
_STATIC = (*_DROPS, "stale")


class Question(NamedTuple):
    """Who connects to what: a Service, or "pod" for that of node2; `size` is 0 without data."""

    client: str
    target: str
    family: int = 4
    size: int = 0

    @property
    def first(self) -> str:
        """The node whose rules choose the endpoint."""
        return _NODE_OF[self.client]

    @property
    def ends(self) -> tuple[str, ...]:
        """The nodes of the endpoints."""
        return ("node2",) if self.target == "pod" else ("node1", "node2")


def met_faults(faults: Sequence[str], question: Question, end: str) -> list[str]:
    """Return the faults that connections to the endpoint on a node meet, the first one first."""
    first, tcp = question.first, question.target != "names"
    far, web = first != end, question.target == APP
    gone = web and (first, end) == ("node1", "node2") and "stale" in faults
    drops = list(_DROPS) if tcp and "node2" in (first, end) and not (web and "port" in faults) else []
    on_first, on_second = (drops, []) if first == "node2" else ([], drops)
    order = [
        *(["conntrack"] if first == "node1" else []),
        *(["stale"] if gone else []),
        *on_first,
        *(["link"] if far else []),
        *(["conntrack"] if far and end == "node1" else []),
        *on_second,
        *(["port"] if web else []),
        *(["asymmetric"] if tcp and far and question.client != "outside" else []),
        *(["mtu"] if tcp and far and question.size > NARROW else []),
    ]
    return [name for name in order if name in faults]


def may_be_named(met: Sequence[str]) -> set[str]:
    """Return the faults that an answer may name for an endpoint."""
    # A refusal may get lost on its way back.
    reply = {"asymmetric"} if met[:1] == ["port"] else set[str]()
    return {*met[:1], *(name for name in met if name in _STATIC), *(name for name in met if name in reply)}


def named_faults(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the fault that each cause of an answer names, "" if it does not tell, and its words."""
    for one in answer["causes"]:
        text = answer["message"] if one["cause"] == "as-predicted" else one["text"]
        match one["cause"]:
            case "arrived":
                continue
            case "as-predicted" | "dropped":
                words = {"lab-fault": "nftables", "filter FORWARD": "iptables", "have gone": "stale"}
                known = [fault for word, fault in words.items() if word in text]
                yield (known[0] if known else "unknown", text)
            case "never-arrived":
                yield "link", text
            case "not-listening":
                yield "port", text
            case "lost" if "nothing listens at" in text:
                yield "port", text
            case "reply-lost" | "reply-unmatched":
                yield "asymmetric", text
            case "mtu":
                yield "mtu", text
            case "table-full":
                yield "conntrack", text
            case "lost" | "refused" | "unanswered" | "unknown" | "no-reply":
                yield "", f"{one['cause']}: {text}"
            case other:
                yield other, text


def _honest(words: str, met: Sequence[Sequence[str]], first: str) -> bool:
    """Return whether an answer that names no fault fits the faults that connections meet first."""
    firsts = {one[0] for one in met if one}
    if words.startswith("lost: were lost on"):
        return first == "node1" and "conntrack" in firsts
    if words.startswith("lost:"):
        return bool(firsts & {"link", "conntrack", *_DROPS})
    if words.startswith("refused:"):
        return bool(firsts & {"port", "stale"}) and "or a firewall" in words
    if words.startswith("no-reply: reached"):
        return False  # names the endpoint, which answers
    return bool(firsts)


def problems(faults: Sequence[str], question: Question, answer: dict[str, Any]) -> list[str]:
    """Return what is wrong in an answer."""
    met = [met_faults(faults, question, end) for end in question.ends]
    allowed = set().union(*map(may_be_named, met))
    # The last packet of the handshake meets the firewall: the connection exists, and its data may get lost.
    half = ("asymmetric" in faults) and question.client == "client-2"
    if half:
        allowed |= {"data-lost", "late"}
    found = [
        f"names {fault or 'no fault'}, where probes meet {met}: {words}"
        for fault, words in named_faults(answer)
        if (fault not in allowed if fault else not _honest(words, met, question.first))
    ]
    works, broken = answer["verdict"] == "works", any(met)
    if works == broken and not (half and works and all(one in ([], ["asymmetric"]) for one in met)):
        found.append(f"says {answer['verdict']}, where probes meet {met}: {answer['message']}")
    return found


class Cluster(NamedTuple):
    """A lab with two clients, and Services with an endpoint on each node."""

    lab: Lab
    services: dict[str, LabService]

    def answer(self, question: Question) -> dict[str, Any]:
        lab = self.lab
        target, ends = question.target, [f"pod/default/{question.client}", f"svc/default/{question.target}"]
        if target == "pod":
            pod = next(pod for pod in lab.pods.values() if (pod.app, pod.site.name) == (APP, "node2"))
            ends[1] = f"pod/default/{pod.name}:8080"
        if question.client == "outside":
            ends = [lab.outside.addresses[question.family == 6], ends[1], "--via-node", "node1"]
        options = ["--count", str(COUNT), "--family", f"ipv{question.family}"]
        if question.size:
            options += ["--size", str(question.size)]
        if target == "names":
            options += ["--payload", "name"]
        with lab.outside.namespace.entered():
            done = kubectl(lab, "pykubeproxy", "trace", "--live", "-o", "json", *ends, *options)
        if not done.stdout:
            raise RuntimeError(f"trace --live ended with {done.returncode}: {done.stderr.strip()}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def works(self) -> bool:
        """Return whether all connections arrive."""
        lab = self.lab
        probers = [pod.prober for pod in lab.pods.values() if pod.app == "client"]
        return not any(
            (prober.udp if name == "names" else prober.tcp)(service.vip(family), 12, timeout=0.3).failed
            for name, service in self.services.items()
            for prober in probers
            for family in (4, 6)
        )


@contextmanager
def built(backend: str, kube_proxy: KubeProxyBinary | None) -> Iterator[Cluster]:
    with Lab(f"ff{os.getpid()}", backend=backend, kube_proxy=kube_proxy) as lab:
        lab.deploy("client", 2)
        for app in (APP, "shop", "names"):
            lab.deploy(app, 2)
        services = {
            APP: lab.service(APP, type="NodePort"),
            "shop": lab.service("shop", type="NodePort"),
            "names": lab.service("names", protocols=("UDP",)),
        }
        yield Cluster(lab, services)


@contextmanager
def traffic(cluster: Cluster, chance: random.Random) -> Iterator[None]:
    """Open other connections meanwhile, from a client and to a Service."""
    pod, ended = cluster.lab.pods[chance.choice(["client-1", "client-2"])], threading.Event()
    target = cluster.services[chance.choice([APP, "shop"])].vip()

    def connect() -> None:
        while not ended.wait(0.02):
            pod.prober.tcp(target, timeout=0.1)

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def rules(cluster: Cluster, chance: random.Random) -> Iterator[None]:
    """Add rules of others to a node, which meet no probe or let it pass."""
    lab, node = cluster.lab, chance.choice(["node1", "node2"])
    suffix = "" if lab.backend == "auto" else f"-{lab.backend}"
    kind = chance.choice(["iptables", "nftables"])
    if kind == "iptables":
        rule = chance.choice(
            ["-p tcp --dport 9999 -j DROP", "-s 198.51.100.7 -j DROP", "-m length --length 60000: -j DROP"]
        )
        add, remove = (f"iptables{suffix} -w -{verb} FORWARD {rule}" for verb in "ID")
    else:
        rule = chance.choice(
            ["tcp dport 9999 drop", "meta length > 60000 drop", "counter accept", "udp dport 9 reject"]
        )
        chain = f"chain c {{ type filter hook {chance.choice(['forward', 'input'])} priority 5; {rule}; }}"
        add, remove = f"nft 'table inet noise {{ {chain}; }}'", "nft delete table inet noise"
    with lab.nodes[node].namespace.entered():
        subprocess.run(["sh", "-ec", add], check=True)
    try:
        yield
    finally:
        with lab.nodes[node].namespace.entered():
            subprocess.run(["sh", "-ec", remove], check=True)


def question(chance: random.Random) -> Question:
    """Choose who connects to what."""
    client = chance.choices(["client-1", "client-2", "outside"], [6, 2, 2])[0]
    targets = [APP, "shop", "names", "pod"] if client != "outside" else [APP, "shop"]
    target = chance.choices(targets, [8, 1, 2, 2][: len(targets)])[0]
    size = _SIZE if target != "names" and chance.random() < 0.5 else 0
    return Question(client, target, chance.choice([4, 4, 6]), size)


def run(cluster: Cluster, seed: int) -> tuple[list[str], str]:
    """Break the lab, ask, and mend it. Return what is wrong in the answer, which is saved then, and a line about it."""
    chance = random.Random(seed)
    number = chance.choices([0, 1, 2], [1, 6, 3])[0]
    chosen = sorted(chance.sample(range(len(FAULTS)), number))
    faults = [FAULTS[at].name for at in chosen]
    asked = question(chance)
    noise: list[Callable[[Cluster, random.Random], Any]] = [
        one for one in (traffic, rules) if chance.random() < 0.3
    ]
    cluster.lab.until(cluster.works, "a healthy lab")
    try:
        with ExitStack() as stack:
            for make in noise:
                stack.enter_context(make(cluster, chance))
            for at in chosen:
                break_lab(cluster.lab, FAULTS[at])
                if FAULTS[at].name in ("port", "stale"):
                    time.sleep(_SYNC_SECONDS)
            answer = cluster.answer(asked)
    finally:
        mend(cluster.lab)
    named = [fault or "unclear" for fault, _ in named_faults(answer)]
    noisy = f" beside {' and '.join(one.__name__ for one in noise)}" if noise else ""
    told = f"{answer['verdict']}, {', '.join(dict.fromkeys(named)) or 'no fault'}"
    if "unclear" in named:
        told += f": {answer['message']}"
    found = problems(faults, asked, answer)
    if found:
        saved = Path(tempfile.gettempdir(), f"faults-{seed}.json")
        saved.write_text(json.dumps(answer, indent=2))
        told += f" (saved in {saved})"
    return found, f"{'+'.join(faults) or 'none'}{noisy}; {asked}: {told}"


def fuzz(runs: int, seed: int, backend: str = "auto", kube_proxy: KubeProxyBinary | None = None) -> list[str]:
    """Return what was wrong."""
    failures: list[str] = []
    with built(backend, kube_proxy) as cluster:
        for one in range(seed, seed + runs):
            found, line = run(cluster, one)
            print(f"{one}  {line}", flush=True)
            failures += [f"seed {one} ({line}): {problem}" for problem in found]
            for problem in found:
                print(f"    WRONG {problem}", flush=True)
    return failures


def main() -> int:
    """Return 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.faults", description=__doc__)
    add = parser.add_argument
    add("--runs", type=int, default=20, help="number of runs (default: 20)")
    add(
        "--seed",
        type=int,
        default=random.randrange(1 << 24),
        help="seed of the first run; each other has the next",
    )
    add("--backend", choices=["auto", "nft", "legacy"], default="auto", help="of iptables")
    add("--kube-proxy", type=Path, help="a kube-proxy to run in place of the agents")
    add("--proxy-mode", choices=["iptables", "nftables"], default="iptables", help="its mode")
    given = parser.parse_args()
    binary = kube_proxy_binary(given.kube_proxy, given.proxy_mode) if given.kube_proxy else None
    print(f"{given.runs} runs, seed {given.seed}", flush=True)
    failures = fuzz(given.runs, given.seed, given.backend, binary)
    wrong = Counter(failure.partition(" (")[0] for failure in failures)
    print(
        f"{len(wrong)} of {given.runs} runs with a wrong answer: {', '.join(wrong)}"
        if wrong
        else "no wrong answer"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
