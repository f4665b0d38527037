"""Parsing the text of a rule."""

import pytest

from pykubeproxy.rules.parse import parse_rule, without_comment


def test_options() -> None:
    """Negated and quoted values and options without a value are parsed."""
    rule = parse_rule(
        '! -s 10.244.0.0/16 -d 10.96.1.1/32 -i eth+ -p tcp -m comment --comment "ns1/web:http \\"quoted\\" -j X"'
        " -m recent --rcheck --seconds 60 ! --dst-type LOCAL -m tcp --dport 80 -j KUBE-MARK-MASQ"
    )
    assert rule.options == {
        "-s": "! 10.244.0.0/16",
        "-d": "10.96.1.1/32",
        "-i": "eth+",
        "-p": "tcp",
        "-m": "tcp",
        "--comment": 'ns1/web:http "quoted" -j X',
        "--rcheck": "",
        "--seconds": "60",
        "--dst-type": "! LOCAL",
        "--dport": "80",
        "-j": "KUBE-MARK-MASQ",
    }
    assert (rule.destination, rule.port, rule.protocol, rule.target) == (
        "10.96.1.1",
        80,
        "TCP",
        "KUBE-MARK-MASQ",
    )


@pytest.mark.parametrize(
    ("text", "destination"),
    [
        ("-d fd00::1/128", "fd00::1"),
        ("-d fd00::/64", ""),
        ("! -d 10.0.0.1/32", ""),
        ("-d 10.0.0.0/255.0.255.0", ""),
        ("-j X", ""),
    ],
)
def test_destination(text: str, destination: str) -> None:
    """Only a single address counts as destination."""
    assert parse_rule(text).destination == destination


@pytest.mark.parametrize(("text", "port"), [("--dport 80", 80), ("--dport 80:90", 0), ("! --dport 80", 0)])
def test_port(text: str, port: int) -> None:
    """Only a single port counts as port."""
    assert parse_rule(f"-p tcp -m tcp {text} -j X").port == port


@pytest.mark.parametrize(
    ("text", "unconditional"),
    [
        ("-j X", True),
        ("-m statistic --mode random --probability 0.5 -j X", True),
        (
            "-p tcp -m recent --set --name X --mask 255.255.255.255 --rsource -m tcp -j DNAT --to-destination 1.2.3.4:5",
            True,
        ),
        ("-s 10.0.0.1/32 -j X", False),
        ("-m addrtype --src-type LOCAL -j X", False),
        ("-m recent --rcheck --seconds 3 --reap --name X --mask 255.255.255.255 --rsource -j X", False),
    ],
)
def test_unconditional(text: str, unconditional: bool) -> None:
    """Probability and protocol are not conditions; every other match is."""
    assert parse_rule(text).unconditional is unconditional


def test_options_with_several_values() -> None:
    """The values of one option are joined; the last of repeated options counts."""
    rule = parse_rule("-p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -m mark --mark 0x1 -j ACCEPT")
    assert rule.options["--tcp-flags"] == "FIN,SYN,RST,ACK SYN"
    assert rule.options["-m"] == "mark"


def test_title_is_the_service_port() -> None:
    """It is the first word of a comment with a slash in it."""
    assert parse_rule('-m comment --comment "ns1/web:http cluster IP" -j X').title == "ns1/web:http"
    assert parse_rule('-m comment --comment "kubernetes service portals" -j X').title == ""


def test_comment_is_unquoted_and_removable() -> None:
    rule = '-s 10.0.0.1/32 -m comment --comment "say \\"-j DROP\\"" -m mark --mark 0x1 -j ACCEPT'
    assert parse_rule(rule).comment == 'say "-j DROP"'
    assert without_comment(rule) == "-s 10.0.0.1/32 -m mark --mark 0x1 -j ACCEPT"
    assert parse_rule("-m comment --comment word -j ACCEPT").comment == "word"
    assert parse_rule("-j ACCEPT").comment == ""
