"""The grammar of restore input: an allowlist of lines, options and values."""

import ipaddress
import re
from collections.abc import Callable
from typing import NamedTuple

_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_PORT_NAME = rf"{_LABEL}/{_LABEL}(?::{_LABEL})?"
_OWN = r"KUBE-(?:SVC|SVL|EXT|FW|SEP)-[A-Z2-7]{16}"
_FIXED = (
    r"KUBE-(?:SERVICES|EXTERNAL-SERVICES|NODEPORTS|POSTROUTING|MARK-MASQ|FORWARD|PROXY-FIREWALL|PROXY-CANARY)"
)
_BUILT_IN = r"PREROUTING|INPUT|FORWARD|OUTPUT|POSTROUTING"
_ADDRESS = r"\[?[0-9a-f.:]+\]?"
_COMMENT = re.compile(
    rf"{_PORT_NAME}"
    rf"|{_PORT_NAME} (?:cluster IP|external IP|loadbalancer IP|health check node port)"
    rf"|{_PORT_NAME} has no (?:local )?endpoints"
    rf"|{_PORT_NAME}(?: port \d{{1,5}})? is quarantined"
    rf"|{_PORT_NAME} -> (?:{_ADDRESS}:\d{{1,5}}|\d+ endpoints)"
    rf"|{_PORT_NAME} traffic not accepted by {_OWN}"
    rf"|other traffic to {_PORT_NAME} will be dropped by KUBE-PROXY-FIREWALL"
    rf"|(?:masquerade traffic|pod traffic|masquerade LOCAL traffic|route LOCAL traffic) for {_PORT_NAME}"
    r" external destinations"
    r"|kubernetes (?:load balancer firewall|service portals|externally-visible service portals"
    r"|health check service ports|forwarding rules|postrouting rules|forwarding conntrack rule"
    r"|service traffic requiring SNAT|service nodeports; NOTE: this must be the last rule in this chain)"
    r"|block incoming localnet connections"
    r"|services at [0-9a-f.:]+/\d{1,3}"
    r"|(?:tcp|udp|sctp) node ports \d{1,5}-\d{1,5}"
)
_WORD = re.compile(r'"([^"\\]*)"|([^\s"\\]+)')


def _network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=True)
    except ValueError:
        return False
    return "/" in text


def _target(text: str) -> bool:
    address, _, port = text.rpartition(":")
    try:
        ip = ipaddress.ip_address(address.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return (ip.version == 6) is address.startswith("[") and _number(port, 65535)


def _number(text: str, most: int) -> bool:
    return bool(re.fullmatch("[1-9][0-9]*", text)) and int(text) <= most


def _ports(text: str) -> bool:
    # A dispatch branch may begin at port 0.
    return all(it == "0" or _number(it, 65535) for it in text.split(":")) and text.count(":") <= 1


def _like(pattern: str) -> Callable[[str], bool]:
    compiled = re.compile(pattern)
    return lambda text: bool(compiled.fullmatch(text))


_VALUES: dict[str, Callable[[str], bool] | None] = {
    "-s": _network,
    "-d": _network,
    "-i": _like(r"[!#-&(-.0-9;-\[\]-~]{1,15}"),
    "-p": _like("tcp|udp|sctp"),
    "-m": _like("comment|conntrack|addrtype|mark|statistic|recent|nfacct|tcp|udp|sctp"),
    "--comment": lambda text: bool(_COMMENT.fullmatch(text)) and len(text) <= 255,
    "--dport": _ports,
    "--ctstate": _like("NEW|INVALID|RELATED,ESTABLISHED|RELATED,ESTABLISHED,DNAT"),
    "--mark": _like("0x[0-9a-f]+/0x[0-9a-f]+"),
    "--set-xmark": _like("0x[0-9a-f]+/0x[0-9a-f]+"),
    "--dst-type": _like("LOCAL"),
    "--src-type": _like("LOCAL"),
    "--mode": _like("random"),
    "--probability": _like(r"[01]\.\d{11}"),
    "--seconds": lambda text: _number(text, 86400),
    "--name": _like(_OWN),
    "--mask": _like(r"255\.255\.255\.255|ffff(:ffff){7}"),
    "--nfacct-name": _like("ct_state_invalid_dropped_pkts|localhost_nps_accepted_pkts"),
    "--to-destination": _target,
    "--reject-with": _like("icmp6?-port-unreachable"),
    "-j": _like(rf"{_OWN}|{_FIXED}|KUBE-FIREWALL|ACCEPT|DROP|RETURN|REJECT|DNAT|MARK|MASQUERADE"),
    **dict.fromkeys(("--rcheck", "--reap", "--rsource", "--set", "--random-fully")),
}
_NEGATABLE = {"-s", "-d", "-i", "--ctstate", "--mark"}
_LINES = (
    re.compile(r"\*(?:filter|nat|mangle)"),
    re.compile("COMMIT"),
    re.compile(rf":(?:{_OWN}|{_FIXED}|KUBE-FIREWALL) - \[0:0\]"),
    re.compile(rf"-X (?:{_OWN})"),
    re.compile("-N KUBE-FIREWALL"),
)
_RULE = re.compile(rf"-A (?:{_OWN}|{_FIXED}|KUBE-FIREWALL) (.+)")
_JUMP = re.compile(rf"-[ID] (?:{_BUILT_IN}) (.+)")


class Violation(NamedTuple):
    """A line outside the grammar, and its first offending word."""

    line: str
    word: str


def violations(text: str) -> list[Violation]:
    """Return the violations in restore input."""
    lines = text.removesuffix("\n").split("\n") if text else []
    return [Violation(line, word) for line in lines if (word := _line_violation(line))]


def _line_violation(line: str) -> str:
    if any(known.fullmatch(line) for known in _LINES):
        return ""
    rule = _RULE.fullmatch(line) or _JUMP.fullmatch(line)
    return rule_violation(rule[1]) if rule else line or "an empty line"


def rule_violation(rule: str) -> str:
    """Return the first word of a rule outside the grammar, "" if there is none."""
    if _WORD.sub("", rule).strip(" ") or "  " in rule:
        return rule
    words = iter([match[0] for match in _WORD.finditer(rule)])
    negated = False
    for word in words:
        if word == "!":
            negated = True
            continue
        if word not in _VALUES or (negated and word not in _NEGATABLE):
            return word
        negated, matches_value = False, _VALUES[word]
        if matches_value is not None:
            value = next(words, "")
            if value.startswith('"') is not (word == "--comment") or not matches_value(value.strip('"')):
                return f"{word} {value}"
    return ""
