"""Rules taken apart."""

import pytest

from pykubeproxy.inspect.rule import read


def test_options() -> None:
    """Options with their values: negated ones, quoted ones, and those without a value."""
    rule = read(
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
    """Only a single address is one."""
    assert read(text).destination == destination


@pytest.mark.parametrize(("text", "port"), [("--dport 80", 80), ("--dport 80:90", 0), ("! --dport 80", 0)])
def test_port(text: str, port: int) -> None:
    """Only a single port is one."""
    assert read(f"-p tcp -m tcp {text} -j X").port == port


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
    """Chance and the protocol aside, a rule either takes every packet or asks for something."""
    assert read(text).unconditional is unconditional
