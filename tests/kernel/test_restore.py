"""iptables-restore and its fake behave the same in both backends."""

import pytest

from pykubeproxy.kernel import Backend, Failed, Rejected, Tables
from pykubeproxy.rules.ruleset import ChainKey

START = """\
*nat
:AAA - [0:0]
:BBB - [0:0]
:CCC - [0:0]
-A PREROUTING -m comment --comment "to us" -j AAA
-A AAA -d 10.0.0.1/32 -p tcp -m tcp --dport 80 -j BBB
-A AAA -j RETURN
-A CCC -j ACCEPT
COMMIT
"""


def chain(tables: Tables, name: str, table: str = "nat") -> tuple[str, ...] | None:
    return tables.save().chains.get(ChainKey(table, name))


@pytest.fixture
def started(tables: Tables) -> Tables:
    tables.restore(START)
    return tables


def test_chains_and_rules_read_back(started: Tables) -> None:
    """Beside the table's built-in chains."""
    saved = {key.chain: rules for key, rules in started.save().chains.items()}
    assert saved == {
        "PREROUTING": ('-m comment --comment "to us" -j AAA',),
        "INPUT": (),
        "OUTPUT": (),
        "POSTROUTING": (),
        "AAA": ("-d 10.0.0.1/32 -p tcp -m tcp --dport 80 -j BBB", "-j RETURN"),
        "BBB": (),
        "CCC": ("-j ACCEPT",),
    }


def test_chains_are_sorted(started: Tables) -> None:
    """Built-in chains come first, then the others by name."""
    started.restore("*nat\n:ABA - [0:0]\n:aaa - [0:0]\nCOMMIT\n")
    names = [key.chain for key in started.save().chains]
    assert names == ["PREROUTING", "INPUT", "OUTPUT", "POSTROUTING", "AAA", "ABA", "BBB", "CCC", "aaa"]


@pytest.mark.parametrize(
    ("lines", "name", "rules"),
    [
        (":AAA - [0:0]", "AAA", ()),
        (":AAA - [0:0]\n-A AAA -j ACCEPT", "AAA", ("-j ACCEPT",)),
        (":PREROUTING ACCEPT [0:0]", "PREROUTING", ('-m comment --comment "to us" -j AAA',)),
        ("-F AAA", "AAA", ()),
        ("-A CCC -j RETURN", "CCC", ("-j ACCEPT", "-j RETURN")),
        ("[3:4] -A CCC -j RETURN", "CCC", ("-j ACCEPT", "-j RETURN")),
        ("-I CCC -j RETURN", "CCC", ("-j RETURN", "-j ACCEPT")),
        ("-I CCC 2 -j RETURN", "CCC", ("-j ACCEPT", "-j RETURN")),
        ("-D AAA -j RETURN", "AAA", ("-d 10.0.0.1/32 -p tcp -m tcp --dport 80 -j BBB",)),
        ("-D AAA 1", "AAA", ("-j RETURN",)),
        ("-A CCC -j RETURN\n-A CCC -j RETURN\n-D CCC -j RETURN", "CCC", ("-j ACCEPT", "-j RETURN")),
        ("-N DDD", "DDD", ()),
        (":DDD - [0:0]\n:DDD - [0:0]", "DDD", ()),
        ("-F CCC\n-X CCC", "CCC", None),
        (":CCC - [0:0]\n-X CCC", "CCC", None),
        (":AAA - [0:0]\n:BBB - [0:0]\n-X BBB", "BBB", None),
        ("-D AAA 1\n-X BBB", "BBB", None),
        (":NEW - [0:0]\n-X NEW", "NEW", None),
        ("-F", "AAA", ()),
        ("# a remark\n\n-A CCC -j RETURN", "CCC", ("-j ACCEPT", "-j RETURN")),
    ],
)
def test_each_kind_of_line_has_its_effect(
    started: Tables, lines: str, name: str, rules: tuple[str, ...] | None
) -> None:
    started.restore(f"*nat\n{lines}\nCOMMIT\n")
    assert chain(started, name) == rules


@pytest.mark.parametrize(
    ("lines", "number", "exit_codes"),
    [
        ("-A AAA -j RETURN\n-A AAA -j NOWHERE\n-A AAA -j ACCEPT", 2, (2, 2)),
        ("-A AAA -m nonsense -j ACCEPT", 1, (2, 2)),
        ("-A NOWHERE -j ACCEPT", 1, (1, 1)),
        ("-X BBB", 1, (4, 1)),
        ("-X CCC", 1, (4, 1)),
        ("-A CCC -j LATE\n:LATE - [0:0]", 1, (2, 2)),
        ("-X NOWHERE", 1, (1, 1)),
        ("-F NOWHERE", 1, (1, 1)),
        ("-N AAA", 1, (1, 1)),
        ("-D AAA -j ACCEPT", 1, (1, 1)),
        ("-D AAA 7", 1, (1, 1)),
        ("-I AAA 7 -j ACCEPT", 1, (1, 1)),
        ("nonsense", 1, (2, 2)),
        ("-A CCC -j RETURN\n:THIS-NAME-IS-LONGER-THAN-IPTABLES-TAKES - [0:0]", 2, (2, 2)),
    ],
)
def test_an_invalid_line_rejects_its_block(
    started: Tables, lines: str, number: int, exit_codes: tuple[int, int]
) -> None:
    """The error names the line; the previous block is applied."""
    before = started.save(("nat",))
    with pytest.raises(Rejected) as rejected:
        started.restore(f"*filter\n:GOOD - [0:0]\nCOMMIT\n*nat\n{lines}\nCOMMIT\n")
    assert rejected.value.line_number == 4 + number
    assert rejected.value.line == lines.split("\n")[number - 1]
    assert rejected.value.exit_code == exit_codes[started.backend is Backend.LEGACY]
    assert rejected.value.message
    assert started.save(("nat",)) == before
    assert chain(started, "GOOD", "filter") == ()


def test_a_rule_rejected_by_the_kernel(started: Tables) -> None:
    """nft names the line, legacy only the end of the block."""
    text = "*nat\n:AAA - [0:0]\n-A AAA -j ACCEPT\n-A AAA -m nfacct --nfacct-name nobody\n-A AAA -j RETURN\nCOMMIT\n"
    with pytest.raises(Rejected) as rejected:
        started.restore(text)
    nft = started.backend is Backend.NFT
    assert (rejected.value.line_number, rejected.value.exit_code) == ((4, 4) if nft else (6, 1))
    assert rejected.value.whole_block is not nft
    assert chain(started, "AAA") == ("-d 10.0.0.1/32 -p tcp -m tcp --dport 80 -j BBB", "-j RETURN")


def test_blocks_after_a_rejected_one_are_not_applied(started: Tables) -> None:
    with pytest.raises(Rejected):
        started.restore("*nat\n-X NOWHERE\nCOMMIT\n*filter\n:LATER - [0:0]\nCOMMIT\n")
    assert chain(started, "LATER", "filter") is None


def test_input_may_be_written_in_pieces(started: Tables) -> None:
    """Line numbers count over all pieces."""
    pieces = ["*nat\n-A CCC -j RETURN\n", "", "COMMIT\n", "*nat\n", "-A BBB -j ACCEPT\n-X NOWHERE\nCOMMIT\n"]
    with pytest.raises(Rejected) as rejected, started.session() as session:
        for piece in pieces:
            session.write(piece)
    assert (rejected.value.line_number, rejected.value.line) == (6, "-X NOWHERE")
    assert chain(started, "CCC") == ("-j ACCEPT", "-j RETURN")
    assert chain(started, "BBB") == ()
    with started.session():
        pass


def test_a_rejected_block_among_many(started: Tables) -> None:
    """Earlier blocks are applied, later ones are not, however many commands run."""
    pieces = [
        piece
        for n in range(120)
        for piece in (f'*nat\n-A CCC -m comment --comment "rule {n}" -j RETURN\n', "COMMIT\n")
    ]
    pieces[2 * 110] = "*nat\n:NEW - [0:0]\n-X NOWHERE\n"
    with pytest.raises(Rejected) as rejected, started.session() as session:
        for piece in pieces:
            session.write(piece)
    assert (rejected.value.line_number, rejected.value.line) == (3 * 110 + 3, "-X NOWHERE")
    added = (f'-m comment --comment "rule {n}" -j RETURN' for n in range(110))
    assert chain(started, "CCC") == ("-j ACCEPT", *added)
    assert chain(started, "NEW") is None


@pytest.mark.parametrize("text", [":LONG - [0:0]\n", "*nat\n:LONG - [0:0]\n"])
def test_a_rejected_line_before_a_long_text_is_named(started: Tables, text: str) -> None:
    """It is named, however long the next piece is: in the same block or in another one."""
    rules = (f'-A LONG -m comment --comment "{n} {"x" * 200}" -j RETURN\n' for n in range(12_000))
    end = "COMMIT\n" if text.startswith("*") else ""
    pieces = [f"*nat\n-A CCC -j RETURN\n-X NOWHERE\n{end}", text + "".join(rules) + "COMMIT\n"]
    with pytest.raises(Rejected) as rejected, started.session() as session:
        for piece in pieces:
            session.write(piece)
    assert (rejected.value.line_number, rejected.value.line) == (3, "-X NOWHERE")
    assert chain(started, "LONG") is None


def test_a_block_without_commit_is_rejected(started: Tables) -> None:
    with pytest.raises(Rejected) as rejected:
        started.restore("*nat\n:AAA - [0:0]\n")
    assert rejected.value.line_number == 3
    assert chain(started, "AAA") != ()


def test_a_line_outside_a_table_is_rejected(tables: Tables) -> None:
    with pytest.raises(Rejected) as rejected:
        tables.restore("nonsense\n*nat\nCOMMIT\n")
    assert (rejected.value.line_number, rejected.value.line) == (1, "nonsense")


def test_an_unknown_table_is_no_rejection(tables: Tables) -> None:
    """No rule is at fault."""
    with pytest.raises(Failed, match="nonsense"):
        tables.restore("*nonsense\n:AAA - [0:0]\nCOMMIT\n")


@pytest.mark.parametrize("text", ["", "# nothing\n", "*nat\nCOMMIT\n"])
def test_input_without_changes_is_accepted(tables: Tables, text: str) -> None:
    tables.restore(text)
    assert not any(tables.save().chains.values())


def test_has_chain_creates_no_table(started: Tables) -> None:
    assert started.has_chain(ChainKey("nat", "BBB"))
    assert not started.has_chain(ChainKey("nat", "NOWHERE"))
    assert not started.has_chain(ChainKey("filter", "BBB"))
    assert started.save().tables() == ("nat",)


def test_save_returns_only_the_given_tables(started: Tables) -> None:
    """Missing tables are not created."""
    started.restore("*filter\n:FFF - [0:0]\nCOMMIT\n")
    assert started.save(("filter", "mangle")).tables() == ("filter",)
    assert started.save(("nat",)).tables() == ("nat",)
    assert len(started.save(("mangle",))) == 0
    assert sorted(started.save().tables()) == ["filter", "nat"]
