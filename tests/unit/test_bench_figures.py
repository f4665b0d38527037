"""Benchmark figures are compared with their targets."""

import re
from pathlib import Path

import msgspec
import pytest

from tests.bench import figures as f
from tests.bench import page
from tests.bench.checkout import NoRevision, image_python
from tests.bench.figures import Figure
from tests.bench.plan import FULL_SCALE, PARTS, Effort, steps
from tests.bench.report import Report, as_json, as_table
from tests.bench.targets import judge
from tests.bench.workload import Size

BIG = Size(5000, 10)


def figure(name: str, *runs: float, backend: str = "nft", size: Size = BIG, **fields: str) -> Figure:
    """Return a figure of pykubeproxy, in seconds."""
    defaults = {"program": f.OURS, "variant": "", "unit": "s"}
    return Figure(backend, name, size, runs=runs, **{**defaults, **fields})


def test_the_median_counts() -> None:
    """One slow run of three does not miss a target, two do."""
    assert [verdict.reached for verdict in judge([figure(f.CHANGE, 0.1, 0.14, 99.0)])] == [True]
    (missed,) = judge([figure(f.CHANGE, 0.1, 0.18, 9.0)])
    assert (missed.reached, round(missed.ratio or 0, 2)) == (False, 1.2)


def test_the_json_has_the_targets() -> None:
    """Each with its ratio to the limit, None if a figure is missing."""
    report = Report({}, [figure(f.MEMORY, 90.0, unit="MB"), figure(f.START, 1.0)], [])
    targets = msgspec.json.decode(as_json(report))["targets"]
    assert [(it["target"], it["ratio"], it["reached"]) for it in targets] == [
        ("≤ 100 MB", 0.9, True),
        ("≤ 1.2 x alone + 0.8 s", None, None),
    ]


def test_compares_with_the_tools_alone() -> None:
    """A ratio needs the figure of the tools alone for the same backend, size and variant."""
    change = figure(f.CHANGE, 0.5, backend="legacy")
    assert [verdict.reached for verdict in judge([change])] == [None]
    elsewhere = figure(f.CHANGE, 9.0, program=f.ALONE)
    assert [verdict.reached for verdict in judge([change, elsewhere])] == [None]
    slow, fast = (figure(f.CHANGE, v, backend="legacy", program=f.ALONE) for v in (0.5, 0.4))
    assert [verdict.reached for verdict in judge([change, slow])] == [True]
    assert [verdict.reached for verdict in judge([change, fast])] == [False]


def test_the_table_says_what_a_target_needs() -> None:
    """A target without the figure that it depends on names the option or part that measures it."""
    figures = [
        figure(f.START, 1.0, backend="legacy"),
        figure(f.FIRST_LIST, 0.3, size=Size(0, 1)),
        figure(f.REPAIR_ALL, 1.0),
    ]
    rows = {line.split(",")[0]: line for line in as_table(Report({}, figures, []))}
    assert rows["start"].endswith("≤ 1 x kube-proxy      needs --peer")
    assert rows["first list requested"].endswith("≤ 2.5 x alone         needs part launch")
    assert rows["repair"].endswith("≤ 1.2 x alone         alone missing")


def test_a_limit_may_add_seconds() -> None:
    """A start may take 1.2 times the time of iptables-restore alone and 0.8 s."""
    (verdict,) = judge([figure(f.START, 3.4), figure(f.START, 2.0, program=f.ALONE)])
    assert round(verdict.ratio or 0, 3) == round(3.4 / 3.2, 3)
    assert verdict.target.text("s") == "≤ 1.2 x alone + 0.8 s"


def test_growth_counts_the_time_of_a_rule_above_that_of_no_service() -> None:
    """iptables alone may grow, and sets the limit if it does."""
    huge, none = Size(10_000, 10), Size(0, 1)
    starts = [figure(f.START, 1.0, size=none), figure(f.START, 5.0), figure(f.START, 12.0, size=huge)]
    alone = [figure(f.START, v, size=size, program=f.ALONE) for v, size in ((2.0, BIG), (3.0, huge))]
    ours, tools = f.growth([*starts, *alone])
    assert (ours.program, ours.value) == (f.OURS, 11.0 / (2 * 4.0))
    assert (tools.program, tools.value) == (f.ALONE, 1.0)
    assert [verdict.reached for verdict in judge([ours, tools])] == [False]
    assert [
        verdict.reached for verdict in judge([ours, figure(f.GROWTH, 1.2, size=huge, program=f.ALONE)])
    ] == [True]


def test_the_page_is_filled_from_the_json() -> None:
    """Cells of a table between markers get the new figures; others keep their text, and rows without any are omitted."""
    figures = [figure(f.START, 6.5), figure(f.START, 5.0, program=f.ALONE)]
    read = page.read([as_json(Report({}, figures, []))]).figures
    assert read == figures
    former = [
        *page.tables([])["summary"][:2],
        "| Start with 5000x10 | 9.99 s | 42.0 s |  |  |  | 2.00 s |",
        "| Memory at 5000x10 | 88 MB |  |  |  |  |  |",
        "| No such row | 1 |  |  |  |  |  |",
    ]
    text = "\n".join(
        ("before", "<!-- figures: summary -->", "", *former, "", "<!-- end of figures -->", "after")
    )
    assert page.filled(text, read).splitlines() == [
        "before",
        "<!-- figures: summary -->",
        "",
        *former[:2],
        "| Start with 5000x10 | 6.50 s | 42.0 s | 5.00 s |  |  | 2.00 s |",
        "| Memory at 5000x10 | 88 MB |  |  |  |  |  |",
        "",
        "<!-- end of figures -->",
        "after",
    ]
    assert page.filled(page.filled(text, read), read) == page.filled(text, read)


def test_reports_of_parts_are_read_as_one() -> None:
    """Runs of the same figure count together, and the time per rule follows from all starts."""
    starts = [figure(f.START, 5.0), figure(f.START, 12.0, size=Size(10_000, 10)), figure(f.START, 7.0)]
    reports = [Report({}, [it, *f.growth([it])], [f"note {it.value}"]) for it in starts]
    together = page.read(map(as_json, reports))
    assert together.figures[:2] == [figure(f.START, 5.0, 7.0), starts[1]]
    (growth,) = together.figures[2:]
    assert (growth.name, growth.value) == (f.GROWTH, 1.0)
    assert together.notes == ["note 5.0", "note 12.0", "note 7.0"]


def test_the_page_has_all_tables() -> None:
    """Each marker of the page names a table, and each table has its place."""
    markers = re.findall(r"<!-- figures: (\w+) -->", page.PAGE.read_text())
    assert sorted(markers) == sorted(page.tables([]))


def test_measures_with_the_packages_of_the_image(tmp_path: Path) -> None:
    """Checkouts with the same requirements.txt share an environment, which is made once and has no other package."""
    folders = [tmp_path / name for name in ("one", "same", "other")]
    for folder, text in zip(folders, ("", "", "# other\n"), strict=True):
        folder.mkdir()
        (folder / "requirements.txt").write_text(text)
    venvs = tmp_path / "venvs"
    first = Path(image_python(folders[0], venvs))
    assert not list(first.parents[1].glob("lib/*/site-packages/*"))
    mark = first.with_name("mark")
    mark.touch()
    assert [image_python(it, venvs) == str(first) for it in folders] == [True, True, False]
    assert mark.exists()
    with pytest.raises(NoRevision, match=r"no requirements\.txt"):
        image_python(tmp_path, venvs)


def test_each_part_has_its_sizes() -> None:
    """Long measurements run only where a target or a curve needs them, and small sizes start more often."""
    planned = steps(FULL_SCALE, PARTS, Effort())
    sizes = {
        row: [str(it.size) for it in planned if row in it.rows]
        for row in ("churn", "idle", "inspect", "memory")
    }
    assert (sizes["churn"], sizes["idle"]) == (["500x10", "5000x10"], ["5000x10"])
    assert sizes["inspect"] == ["10000x10"]
    assert sizes["memory"] == [str(it) for it in sorted(FULL_SCALE.starts)]
    runs = {str(it.size): it.runs for it in planned if "start" in it.rows}
    assert runs["1000x10"] > runs["20000x5"] > 1


def test_compares_with_the_better_mode_of_kube_proxy() -> None:
    """First packets have kube-proxy's better mode as limit; flat dispatch has no target."""
    size = Size(5000, f.FIRST_ENDPOINTS)
    ours = [figure(f.FIRST, 20.0, size=size, variant=variant) for variant in ("flat", "tree")]
    modes = [
        figure(f.FIRST, value, size=size, program=f.PEER, variant=mode)
        for value, mode in ((37.0, ""), (16.0, "nftables"))
    ]
    verdicts = [verdict for verdict in judge([*ours, *modes]) if verdict.target.of == f.PEER]
    assert [(verdict.figure.variant, verdict.ratio) for verdict in verdicts] == [("tree", 1.25)]


def test_compares_with_the_fewest_services() -> None:
    """A first packet at many Services is compared with the fewest Services and the same dispatch mode."""
    few, many = Size(100, f.FIRST_ENDPOINTS), Size(30_000, f.FIRST_ENDPOINTS)
    figures = [
        figure(f.FIRST, value, size=size, variant=variant)
        for size, variant, value in (
            (few, "flat", 1.0),
            (few, "tree", 10.0),
            (many, "flat", 400.0),
            (many, "tree", 12.0),
        )
    ]
    (verdict,) = judge(figures)
    assert (verdict.figure.variant, verdict.ratio) == ("tree", 12.0 / 15.0)


def test_small_sizes_keep_their_digits() -> None:
    """The data received at a start is about a megabyte."""
    assert [f.show(value, "MB") for value in (1.267, 116.4)] == ["1.27 MB", "116 MB"]


def test_the_table_fits() -> None:
    """No line is longer than 140 columns, even with all programs, long numbers and notes."""
    report = Report(
        {"time": "now"}, [], ["kube-proxy, nft, 30000x2: " + "ended, and why is a long story " * 9]
    )
    size = Size(30_000, f.FIRST_ENDPOINTS)
    for name in (f.FIRST, f.POD):
        report.add(figure(name, 123.4, size=size, variant="tree", unit="us"))
    report.add(figure(f.FIRST, 660.0, size=size, variant="nftables", unit="us", program=f.PEER))
    for name in (f.START, f.START_CPU, f.MEMORY, f.CHANGE, f.IDLE, f.CHURN):
        report.add(figure(name, 10.0, size=Size(500, 10)))
        report.add(figure(name, 100.0))
    for program in f.PROGRAMS[1:]:
        report.add(figure(f.START, 123.456, program=program))
    lines = list(as_table(report))
    assert max(map(len, lines)) <= 140
    assert "CPU of 1000 changes, from 500x10 to 5000x10: pykubeproxy x 10.0" in lines
