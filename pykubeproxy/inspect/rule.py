"""One rule of iptables-save taken apart."""

import re
from collections.abc import Mapping

import msgspec

_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
# Options that leave open to which packets a rule applies, or say no more than the frontend did.
_UNCONDITIONAL = frozenset(
    {"-m", "-p", "-j", "-g", "--comment", "--mode", "--probability", "--to-destination", "--set-xmark"}
    | {"--set", "--name", "--mask", "--rsource", "--random", "--persistent", "--nfacct-name"}
)


class Rule(msgspec.Struct, frozen=True, gc=False):
    """The options of a rule with their values, "" for those without; a negated value begins with "! ".

    Of an option that stands several times, as `-m` may, the last value is kept.
    """

    options: Mapping[str, str]

    @property
    def target(self) -> str:
        """Where the rule sends a packet: a chain or a built-in target; "" if it only counts."""
        return self.options.get("-j") or self.options.get("-g", "")

    @property
    def comment(self) -> str:
        return self.options.get("--comment", "")

    @property
    def probability(self) -> float:
        """The share of packets that the rule takes of those that it could take, 0 to 1."""
        return float(self.options.get("--probability", "1"))

    @property
    def unconditional(self) -> bool:
        """Whether the rule, chance and transport protocol aside, applies to every packet that gets to it."""
        return self.options.keys() <= _UNCONDITIONAL

    @property
    def destination(self) -> str:
        """The one address that the rule is for, without the length of its prefix; "" if it is for others."""
        address, _, length = self.options.get("-d", "").partition("/")
        whole = length in ("", "128" if ":" in address else "32")
        return address if whole and not address.startswith("!") else ""

    @property
    def port(self) -> int:
        """The one destination port that the rule is for; 0 if it is for any, several or all but one."""
        text = self.options.get("--dport", "")
        return int(text) if text.isdecimal() else 0

    @property
    def protocol(self) -> str:
        """The protocol as Kubernetes writes it: TCP."""
        return self.options.get("-p", "").upper()


def read(text: str) -> Rule:
    """Take a rule apart: the text that iptables-save prints after `-A CHAIN `."""
    options: dict[str, str] = {}
    name, negated = "", False
    for word in _WORD.findall(text):
        if word == "!":
            negated = True
        elif word[0] == "-" and len(word) > 1 and not word[1].isdecimal():
            name = word
            options[name] = "! " if negated else ""
            negated = False
        elif name:
            value = re.sub(r"\\(.)", r"\1", word[1:-1]) if word[0] == '"' else word
            options[name] = (options[name] + value) if options[name] in ("", "! ") else value
    return Rule(options)
