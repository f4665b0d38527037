"""Figures of the benchmark: merged reports, texts, and the tables of the page."""

from tests.bench import figures as f
from tests.bench.figures import Figure, Report, as_json, merged
from tests.bench.page import draw, filled
from tests.bench.workload import Size

_SIZE = Size(10, 2)
_PAGE = "before\n<!-- figures: summary -->\n<!-- end of figures -->\n<!-- figures: load -->\nkept\n<!-- end of figures -->\n"


def start(program: str, *runs: float, over: float = 0.0) -> Figure:
    return Figure("nft", f.START, _SIZE, program, "", "s", runs, over)


def report(*figures: Figure) -> bytes:
    return as_json(Report({}, [*figures], []))


def test_the_last_report_of_a_figure_counts() -> None:
    """A figure of one report only stays."""
    both = merged([report(start(f.OURS, 1.0), start(f.PEER, 3.0)), report(start(f.OURS, 2.0, 4.0))])
    assert both.figures == [start(f.OURS, 2.0, 4.0), start(f.PEER, 3.0)]


def test_texts_show_the_spread_percentiles_and_limits() -> None:
    """A median has its spread, a distribution p50, p99 and the number of samples."""
    assert start(f.OURS, 2.0, 1.5, 30.25).text == "2 s (1.50 s to 30.2 s)"
    assert start(f.PEER, over=1200.0).text == "> 20 min"
    samples = tuple(map(float, range(1, 101)))
    assert Figure("nft", f.NEW, _SIZE, f.OURS, "", "s", samples).text == "p50 50 s, p99 99 s (of 100)"


def test_the_page_gets_measured_figures_only() -> None:
    """A table without figures stays as it is; the chart shows a limit as such."""
    figures = [start(f.OURS, 2.5), start(f.PEER, over=1200.0)]
    page = filled(_PAGE, figures)
    assert "| 10x2: start, s | 2.50 |  | > 20 min |  |  |  |  |" in page
    assert "<!-- figures: load -->\nkept\n" in page
    assert "&gt; 20 min</text>" in draw(figures)
    assert (filled(_PAGE, []), draw([])) == (_PAGE, "")
