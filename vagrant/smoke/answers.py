"""What was seen, and what that means: judgements without a cluster. Each gives why not, or "" if all is well."""

import json
from collections.abc import Collection, Mapping
from typing import NamedTuple


class Seen(NamedTuple):
    """What a probe saw: how many requests it made, how often each pod answered, how many failed, and why some did."""

    requests: int
    pods: Mapping[str, int]
    failed: int = 0
    failures: tuple[str, ...] = ()


class Reply(NamedTuple):
    """One answer by way of the ingress controller: the client's address as that saw it."""

    forwarded_for: str


def parse(output: str) -> Seen:
    """The last line that a probe has printed. Raises ValueError."""
    lines = output.strip().splitlines()
    if not lines:
        raise ValueError("the probe printed nothing")
    said = json.loads(lines[-1])
    return Seen(said["requests"], said["pods"], said["failed"], tuple(said["failures"]))


def only(seen: Seen, pods: Collection[str]) -> str:
    """Every request was answered, and by these pods, each of them at least once."""
    if seen.failed:
        return f"{seen.failed} of {seen.requests} requests failed: {'; '.join(sorted(set(seen.failures)))}"
    if foreign := seen.pods.keys() - set(pods):
        return f"answered, and should not have: {', '.join(sorted(foreign))}"
    if silent := set(pods) - seen.pods.keys():
        return f"of {seen.requests} requests none went to {', '.join(sorted(silent))}"
    return ""


def unbroken(seen: Seen, at_least: int) -> str:
    """A load that was worth the name, without a single failure."""
    if seen.requests < at_least:
        return f"only {seen.requests} requests were made, {at_least} are needed to tell"
    return only(seen, seen.pods)


def hidden(replies: Mapping[str, Reply | None], ours: Mapping[str, str]) -> str:
    """Under the Cluster policy: every node answers, and the client's address is not seen."""
    if silent := sorted(node for node, reply in replies.items() if reply is None):
        return f"no answer by way of {', '.join(silent)}"
    for node, reply in replies.items():
        if reply and reply.forwarded_for == ours[node]:
            return f"{node} let the client's address through, {ours[node]}"
    return ""


def kept(replies: Mapping[str, Reply | None], ours: Mapping[str, str], local: Collection[str]) -> str:
    """Under the Local policy: the nodes with an endpoint answer and see the client's address; the others are silent."""
    for node, reply in replies.items():
        if node not in local:
            if reply is not None:
                return f"{node} answers, and has no endpoint of its own"
        elif reply is None:
            return f"no answer by way of {node}, which has an endpoint"
        elif reply.forwarded_for != ours[node]:
            return f"by way of {node} the client is {reply.forwarded_for}, not {ours[node]}"
    return ""
