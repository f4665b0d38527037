"""The judge of `make fuzz` finds wrong answers about the faults of a lab."""

from typing import Any

import pytest

from tests.fuzz.faults import Question, met_faults, problems

WEB = Question("client-1", "web", size=2000)


def answer(verdict: str, *causes: tuple[str, str], message: str = "") -> dict[str, Any]:
    return {
        "verdict": verdict,
        "message": message,
        "causes": [{"cause": cause, "text": text} for cause, text in causes],
    }


@pytest.mark.parametrize(
    ("faults", "question", "end", "met"),
    [
        (["link", "mtu"], WEB, "node1", []),
        (["link", "mtu"], WEB, "node2", ["link", "mtu"]),
        (["iptables", "port"], WEB, "node2", ["port"]),
        (["iptables", "link"], WEB._replace(client="client-2"), "node1", ["iptables", "link"]),
        (["stale"], WEB._replace(target="pod"), "node2", []),
        (["iptables", "asymmetric"], WEB._replace(target="names"), "node2", []),
    ],
)
def test_faults_that_connections_meet(
    faults: list[str], question: Question, end: str, met: list[str]
) -> None:
    assert met_faults(faults, question, end) == met


@pytest.mark.parametrize(
    ("faults", "given", "wrong"),
    [
        ([], answer("works", ("arrived", "")), ""),
        ([], answer("unknown", ("unanswered", "")), "names no fault"),
        (["link"], answer("works", ("arrived", "")), "says works"),
        (["link"], answer("differs", ("arrived", ""), ("never-arrived", "never saw")), ""),
        (["link"], answer("differs", ("not-listening", "nothing listens")), "names port"),
        (["port"], answer("differs", ("lost", "tracks none of them")), "names no fault"),
        (
            ["nftables"],
            answer("fails-as-predicted", ("as-predicted", ""), message="(inet lab-fault forward)"),
            "",
        ),
        (
            ["nftables"],
            answer("fails-as-predicted", ("as-predicted", ""), message="(inet firewalld c)"),
            "unknown",
        ),
        (["conntrack"], answer("differs", ("lost", "were lost on node1")), ""),
    ],
)
def test_wrong_answers_are_found(faults: list[str], given: dict[str, Any], wrong: str) -> None:
    found = problems(faults, WEB, given)
    assert (wrong in found[0]) if wrong else not found
