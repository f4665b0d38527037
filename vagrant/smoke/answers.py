"""Evaluate what probes saw, without a cluster. Each check returns the reason of the failure, or ""."""

import json
from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple


class Seen(NamedTuple):
    """A probe's result: requests made, responses by pod, failed requests and reasons of some failures."""

    requests: int
    pods: Mapping[str, int]
    failed: int = 0
    failures: tuple[str, ...] = ()


NOTHING = Seen(0, {})


class Reply(NamedTuple):
    """A response through the ingress controller, with the client address that the controller saw."""

    forwarded_for: str


def parse(output: str) -> Seen:
    """Parse the last line that a probe printed. Raise ValueError."""
    lines = output.strip().splitlines()
    if not lines:
        raise ValueError("the probe printed nothing")
    result = json.loads(lines[-1])
    return Seen(result["requests"], result["pods"], result["failed"], tuple(result["failures"]))


def combined(one: Seen, other: Seen) -> Seen:
    """Return the result of two probes as one."""
    pods = Counter(one.pods) + Counter(other.pods)
    failures = one.failures + other.failures
    return Seen(one.requests + other.requests, pods, one.failed + other.failed, failures)


def ready(desired: int, ready_now: int) -> str:
    """Check that there are agents and all are ready."""
    if not desired:
        return "the DaemonSet selects no node"
    return f"{ready_now} of {desired} agents are ready" if ready_now < desired else ""


def only(seen: Seen, pods: Collection[str]) -> str:
    """Check that all requests succeeded, that only these pods responded, and each at least once."""
    if seen.failed:
        return f"{seen.failed} of {seen.requests} requests failed: {'; '.join(sorted(set(seen.failures)))}"
    if foreign := seen.pods.keys() - set(pods):
        return f"unexpected responses from: {', '.join(sorted(foreign))}"
    if silent := set(pods) - seen.pods.keys():
        return f"none of {seen.requests} requests reached {', '.join(sorted(silent))}"
    return ""


def unbroken(seen: Seen, at_least: int) -> str:
    """Check that enough requests were made and none failed."""
    if seen.requests < at_least:
        return f"only {seen.requests} requests made, at least {at_least} needed"
    return only(seen, seen.pods)


def hidden(replies: Mapping[str, Reply | None], ours: Mapping[str, str]) -> str:
    """Check the policy Cluster: every node responds and hides the client's address."""
    if silent := sorted(node for node, reply in replies.items() if reply is None):
        return f"no response through {', '.join(silent)}"
    for node, reply in replies.items():
        if reply and reply.forwarded_for == ours[node]:
            return f"{node} did not hide the client's address {ours[node]}"
    return ""


def kept(replies: Mapping[str, Reply | None], ours: Mapping[str, str], local: Collection[str]) -> str:
    """Check the policy Local: only nodes with an endpoint respond, and they keep the client's address."""
    for node, reply in replies.items():
        if node not in local:
            if reply is not None:
                return f"{node} responds without a local endpoint"
        elif reply is None:
            return f"no response through {node}, which has an endpoint"
        elif reply.forwarded_for != ours[node]:
            return f"through {node} the client address is {reply.forwarded_for}, not {ours[node]}"
    return ""
