"""`python -m tests.bench.apiserver`."""

import os
import tempfile
from pathlib import Path

import click

from pykubeproxy.lab.machine import RunDirectory, start_janitor
from tests.bench.apiserver import projection, run
from tests.bench.apiserver.run import Measured
from tests.bench.workload import Size


@click.command()
@click.option("--size", default="5000x10", show_default=True, help="Services x endpoints of each.")
@click.option("--changes", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--agents", default="1,10,100", show_default=True, help="Numbers of agents without rules.")
@click.option(
    "--processes", default="1,10", show_default=True, help="Numbers of whole agents; they need root."
)
def main(size: str, changes: int, agents: str, processes: str) -> None:
    """Measure what agents send to the API server and receive from it: bytes, requests and connections."""
    measured = Size.read(size)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number in _numbers(agents):
            _show("watches only", run.measure_watches(measured, number, changes, folder), changes)
        if os.geteuid() == 0:
            _whole_agents(measured, _numbers(processes), changes, folder)
        else:
            click.echo("whole agents need root: skipped")
        bookmarks = run.measure_bookmarks(measured, folder)
        click.echo(f"three bookmarks: {bookmarks.received} bytes")
    projection.show(measured)


def _whole_agents(size: Size, numbers: list[int], changes: int, folder: Path) -> None:
    directory = RunDirectory(f"apiserver{os.getpid()}")
    directory.lock()
    janitor = start_janitor(directory.lab)
    try:
        for number in numbers:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                taken = run.measure_processes(size, number, changes, Path(own), directory.lab)
            _show("whole agents", taken, changes)
    finally:
        directory.release()
        assert janitor.stdin is not None
        janitor.stdin.close()
        janitor.wait(60)


def _show(name: str, measured: Measured, changes: int) -> None:
    agents, start, later = measured.agents, measured.start, measured.changes
    click.echo(f"{agents} agents, {name}:")
    for title, traffic in (("start", start), (f"{changes} changes", later)):
        each = f"{traffic.received / agents:,.0f} bytes each received, {traffic.sent / agents:,.0f} sent"
        click.echo(f"  {title}: {traffic.received:,} bytes received, {traffic.sent:,} sent; {each}")
    click.echo(
        f"  connections: {start.connections} at the start, {later.connections} later, {later.open} open"
    )
    click.echo(f"  bytes at the socket for one change: {later.received / agents / changes:,.0f}")
    for what, count in sorted(measured.counts.items()):
        numbers = f"{count.requests} requests, {count.events} events, {count.bytes:,} bytes"
        click.echo(f"  {what}: {numbers}, {count.plain:,} without gzip")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


if __name__ == "__main__":
    main(prog_name="python -m tests.bench.apiserver")
