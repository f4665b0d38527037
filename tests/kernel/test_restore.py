"""What iptables-restore does with its input; the stand-in must do the same, in either backend."""

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


def test_what_is_written_reads_back(started: Tables) -> None:
    """Chains and rules come back as they were written, the built-in chains of the table beside them."""
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


def test_chains_come_sorted(started: Tables) -> None:
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
def test_line(started: Tables, lines: str, name: str, rules: tuple[str, ...] | None) -> None:
    """Each kind of line does what it says."""
    started.restore(f"*nat\n{lines}\nCOMMIT\n")
    assert chain(started, name) == rules


@pytest.mark.parametrize(
    ("lines", "blamed", "exit_codes"),
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
def test_refused(started: Tables, lines: str, blamed: int, exit_codes: tuple[int, int]) -> None:
    """A line that cannot be carried out is named, and its whole block has no effect; the block before it has."""
    before = started.save(("nat",))
    with pytest.raises(Rejected) as refused:
        started.restore(f"*filter\n:GOOD - [0:0]\nCOMMIT\n*nat\n{lines}\nCOMMIT\n")
    assert refused.value.line_number == 4 + blamed
    assert refused.value.line == lines.split("\n")[blamed - 1]
    assert refused.value.exit_code == exit_codes[started.backend is Backend.LEGACY]
    assert refused.value.message
    assert started.save(("nat",)) == before
    assert chain(started, "GOOD", "filter") == ()


def test_refused_by_the_kernel(started: Tables) -> None:
    """A rule with a counter that does not exist: nft names the line, legacy only the end of the block."""
    text = "*nat\n:AAA - [0:0]\n-A AAA -j ACCEPT\n-A AAA -m nfacct --nfacct-name nobody\n-A AAA -j RETURN\nCOMMIT\n"
    with pytest.raises(Rejected) as refused:
        started.restore(text)
    nft = started.backend is Backend.NFT
    assert (refused.value.line_number, refused.value.exit_code) == ((4, 4) if nft else (6, 1))
    assert refused.value.whole_block is not nft
    assert chain(started, "AAA") == ("-d 10.0.0.1/32 -p tcp -m tcp --dport 80 -j BBB", "-j RETURN")


def test_blocks_after_a_refused_one_are_not_tried(started: Tables) -> None:
    """The first refused block ends the run."""
    with pytest.raises(Rejected):
        started.restore("*nat\n-X NOWHERE\nCOMMIT\n*filter\n:LATER - [0:0]\nCOMMIT\n")
    assert chain(started, "LATER", "filter") is None


def test_text_in_pieces(started: Tables) -> None:
    """It is carried out as the whole would be; a refused line has the number it has in the whole."""
    pieces = ["*nat\n-A CCC -j RETURN\n", "", "COMMIT\n", "*nat\n", "-A BBB -j ACCEPT\n-X NOWHERE\nCOMMIT\n"]
    with pytest.raises(Rejected) as refused, started.session() as session:
        for piece in pieces:
            session.write(piece)
    assert (refused.value.line_number, refused.value.line) == (6, "-X NOWHERE")
    assert chain(started, "CCC") == ("-j ACCEPT", "-j RETURN")
    assert chain(started, "BBB") == ()
    with started.session():
        pass


def test_many_blocks(started: Tables) -> None:
    """However many commands share the blocks: those before a refused one are in force, it is named, none follows."""
    pieces = [
        piece
        for n in range(120)
        for piece in (f'*nat\n-A CCC -m comment --comment "rule {n}" -j RETURN\n', "COMMIT\n")
    ]
    pieces[2 * 110] = "*nat\n:NEW - [0:0]\n-X NOWHERE\n"
    with pytest.raises(Rejected) as refused, started.session() as session:
        for piece in pieces:
            session.write(piece)
    assert (refused.value.line_number, refused.value.line) == (3 * 110 + 3, "-X NOWHERE")
    added = (f'-m comment --comment "rule {n}" -j RETURN' for n in range(110))
    assert chain(started, "CCC") == ("-j ACCEPT", *added)
    assert chain(started, "NEW") is None


@pytest.mark.parametrize("text", [":LONG - [0:0]\n", "*nat\n:LONG - [0:0]\n"])
def test_a_refused_line_before_a_long_text(started: Tables, text: str) -> None:
    """It is named, however long the next piece is: in the same block or in another one."""
    rules = (f'-A LONG -m comment --comment "{n} {"x" * 200}" -j RETURN\n' for n in range(12_000))
    end = "COMMIT\n" if text.startswith("*") else ""
    pieces = [f"*nat\n-A CCC -j RETURN\n-X NOWHERE\n{end}", text + "".join(rules) + "COMMIT\n"]
    with pytest.raises(Rejected) as refused, started.session() as session:
        for piece in pieces:
            session.write(piece)
    assert (refused.value.line_number, refused.value.line) == (3, "-X NOWHERE")
    assert chain(started, "LONG") is None


def test_missing_commit(started: Tables) -> None:
    """A block without COMMIT has no effect."""
    with pytest.raises(Rejected) as refused:
        started.restore("*nat\n:AAA - [0:0]\n")
    assert refused.value.line_number == 3
    assert chain(started, "AAA") != ()


def test_text_outside_a_table(tables: Tables) -> None:
    """A line before any table is refused."""
    with pytest.raises(Rejected) as refused:
        tables.restore("nonsense\n*nat\nCOMMIT\n")
    assert (refused.value.line_number, refused.value.line) == (1, "nonsense")


def test_unknown_table(tables: Tables) -> None:
    """A table that cannot be had is not blamed on any rule."""
    with pytest.raises(Failed, match="nonsense"):
        tables.restore("*nonsense\n:AAA - [0:0]\nCOMMIT\n")


@pytest.mark.parametrize("text", ["", "# nothing\n", "*nat\nCOMMIT\n"])
def test_nothing_to_do(tables: Tables, text: str) -> None:
    """Input without work is fine."""
    tables.restore(text)
    assert not any(tables.save().chains.values())


def test_has_chain(started: Tables) -> None:
    """A chain is found where it is; asking for one in a table that does not exist does not make the table."""
    assert started.has_chain(ChainKey("nat", "BBB"))
    assert not started.has_chain(ChainKey("nat", "NOWHERE"))
    assert not started.has_chain(ChainKey("filter", "BBB"))
    assert started.save().tables() == ("nat",)


def test_save_of_some_tables(started: Tables) -> None:
    """Only the tables asked for are given; one that does not exist has no rules and is not made by asking."""
    started.restore("*filter\n:FFF - [0:0]\nCOMMIT\n")
    assert started.save(("filter", "mangle")).tables() == ("filter",)
    assert started.save(("nat",)).tables() == ("nat",)
    assert len(started.save(("mangle",))) == 0
    assert sorted(started.save().tables()) == ["filter", "nat"]
