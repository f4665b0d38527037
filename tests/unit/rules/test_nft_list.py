"""Read and write rules of nftables."""

import json
import re

import pytest

from pykubeproxy.objects import Family
from pykubeproxy.rules.nft_list import read_nft_lists
from pykubeproxy.rules.nft_text import rule_text
from pykubeproxy.rules.save_files import InvalidSave
from tests.cases import NFT_FOLDER

# What nft 1.0.6 prints for one ruleset with and without -j.
PRINTED_JSON = NFT_FOLDER.parent / "nft-ruleset.json"
PRINTED_TEXT = NFT_FOLDER.parent / "nft-ruleset.txt"
# What the text of a rule leaves out: options and counts that mean nothing to a first packet.
LEFT_OUT = re.compile(
    r'"| packets \d+ bytes \d+| burst \d+ packets| seed \w+| prefix(?= to)| timeout 30s| limit rate over 10/second burst 5 packets'
)
NUMBER = re.compile(r"0x[0-9a-f]+")


# Rare expressions keep the words of the JSON.
OTHERWISE = (
    "tcp flags & ",
    "add @dyn ",
    "reject with icmpx port-unreachable",
    "exthdr rt ",
    "symhash ",
    "ct expiration ",
    "dnat ip to ip daddr map ",
)


def comparable(rule: str) -> str:
    rule = NUMBER.sub(lambda number: str(int(number[0], 16)), LEFT_OUT.sub("", rule.strip()))
    return rule.replace("(", "").replace(")", "").replace(" | ", ",").replace(",", " ")


def test_rules_are_written_as_nft_does() -> None:
    ruleset = read_nft_lists([PRINTED_JSON.read_text()], "file")[Family.IPV4]
    rules = [comparable(rule_text(rule)) for chain in ruleset.chains.values() for rule in chain.rules]
    printed = {comparable(line) for line in PRINTED_TEXT.read_text().splitlines()}
    assert [rule for rule in rules if rule not in printed and not rule.startswith(OTHERWISE)] == []


def test_long_sets_are_abridged() -> None:
    elements = [[number, f"10.0.0.{number}"] for number in range(9)]
    expression = [{"vmap": {"key": {"meta": {"key": "mark"}}, "data": {"set": elements}}}]
    listing = {
        "nftables": [
            {"chain": {"family": "ip", "table": "t", "name": "c"}},
            {"rule": {"family": "ip", "table": "t", "chain": "c", "expr": expression, "comment": "all"}},
        ]
    }
    ((chain,),) = [read_nft_lists([json.dumps(listing)], "file")[Family.IPV4].chains.values()]
    assert rule_text(chain.rules[0]).endswith('3 : 10.0.0.3, … } comment "all"')


def rule_of(statements: str) -> str:
    chain = '{"chain": {"family": "ip", "table": "t", "name": "c"}}'
    rule = '{"rule": {"family": "ip", "table": "t", "chain": "c", "expr": %s}}'
    return f'{{"nftables": [{chain}, {rule % statements}]}}'


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "file: Input data was truncated"),
        ('{"nftables": 1}', "file: Expected `array`, got `int`"),
        (rule_of("[1]"), "file: a rule is invalid: Expected `object`, got `int`"),
        (
            rule_of('[{"accept": null, "drop": null}]'),
            "file: a rule is invalid: a statement has several kinds",
        ),
        (
            (
                '{"nftables": [{"chain": {"family": "ip", "table": "t", "name": "c"}},'
                ' {"map": {"family": "ip", "table": "t", "name": "m", "elem": [[1, {"goto": {"target": "c"}}]]}},'
                ' {"rule": {"family": "ip", "table": "t", "chain": "c", "expr": [{"vmap": {"key": 1, "data": "@m"}}]}}]}'
            ),
            "file: chain c of table ip t jumps to itself, by way of c",
        ),
    ],
    ids=["cut short", "other JSON", "no statement", "two statements", "a circle by way of a map"],
)
def test_invalid_listings(text: str, error: str) -> None:
    with pytest.raises(InvalidSave, match=error.replace("(", r"\(")):
        read_nft_lists([text], "file")
