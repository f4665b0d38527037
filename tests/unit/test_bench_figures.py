"""Benchmark figures are compared with their targets."""

from tests.bench import figures as f
from tests.bench.figures import Figure, judge
from tests.bench.report import Report, as_table
from tests.bench.workload import Size

BIG = Size(5000, 10)


def figure(name: str, *runs: float, backend: str = "nft", size: Size = BIG, **fields: str) -> Figure:
    """Return a figure of pykubeproxy, in seconds."""
    defaults = {"program": f.OURS, "variant": "", "unit": "s"}
    return Figure(backend, name, size, runs=runs, **{**defaults, **fields})


def test_the_median_counts() -> None:
    """One slow run of three does not miss a target, two do."""
    assert [verdict.reached for verdict in judge([figure(f.START, 4.0, 4.4, 99.0)])] == [True]
    (missed,) = judge([figure(f.START, 4.0, 5.4, 9.0)])
    assert (missed.reached, round(missed.ratio or 0, 2)) == (False, 1.2)


def test_compares_with_another_figure() -> None:
    """A ratio needs the named figure of the same backend and size."""
    change = figure(f.CHANGE, 0.5, backend="legacy")
    assert [verdict.reached for verdict in judge([change])] == [None]
    elsewhere = figure(f.REWRITE, 9.0, program=f.TOOL)
    assert [verdict.reached for verdict in judge([change, elsewhere])] == [None]
    slow, fast = (figure(f.REWRITE, v, backend="legacy", program=f.TOOL) for v in (0.5, 0.4))
    assert [verdict.reached for verdict in judge([change, slow])] == [True]
    assert [verdict.reached for verdict in judge([change, fast])] == [False]


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
    """No line is longer than 100 columns, even with long numbers and notes."""
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
    lines = list(as_table(report))
    assert max(map(len, lines)) <= 100
    assert any("CPU of 1000 changes x 10.0" in line for line in lines)
