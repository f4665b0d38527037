"""`pykubeproxy lab`: a cluster without a cluster."""

import signal
import time
from typing import Any

import click

from pykubeproxy.cli.output import echo_json, output_option
from pykubeproxy.lab import documents, report, standing
from pykubeproxy.lab.api import SERVICES, Api
from pykubeproxy.lab.cluster import API_PORT, Lab
from pykubeproxy.lab.namespaces import prefix
from pykubeproxy.lab.network import FABRIC
from pykubeproxy.lab.requirements import Unmet
from pykubeproxy.lab.rundir import AlreadyRunning, RunDirectory
from pykubeproxy.lab.scenarios import SCENARIOS

backend_option = click.option(
    "--iptables-backend",
    "backend",
    type=click.Choice(["auto", "nft", "legacy"]),
    default="auto",
    show_default=True,
    help="What the agents write their rules with.",
)

LOOK_YOURSELF = """
To look for yourself, let one scenario stand and run the commands on its nodes:
  pykubeproxy lab demo SCENARIO --keep
  pykubeproxy lab exec node1 -- pykubeproxy dump-rules"""


@click.group(short_help="Try the proxy on two nodes and some pods, all on this machine.")
def lab() -> None:
    """Try the proxy on two nodes, some pods and an outside client, all on this machine.

    They are network namespaces, with a small API server and an agent on each node. It takes root, it does
    not touch the machine's own network, and it leaves nothing behind.

    \b
    sudo pykubeproxy lab demo
    """


@lab.command(short_help="Run the scenarios with real connections.")
@click.argument("wanted", metavar="[SCENARIO]...", nargs=-1)
@click.option("--list", "list_only", is_flag=True, help="Name the scenarios and do nothing.")
@backend_option
@click.option("--keep", is_flag=True, help="After the last scenario leave the lab standing until Ctrl-C.")
@click.option("--name", default="demo", show_default=True, help="The lab's name.")
@output_option
def demo(wanted: tuple[str, ...], list_only: bool, backend: str, keep: bool, name: str, output: str) -> None:
    """Run the scenarios, or those named, and show what real connections saw.

    The exit code is 1 if something was not as it should be, else 0.

    \b
    sudo pykubeproxy lab demo
    sudo pykubeproxy lab demo scale rolling-update --iptables-backend legacy
    """
    told = output == "json"
    if list_only and told:
        echo_json(documents.listed(SCENARIOS))
        return
    if list_only:
        for scenario in SCENARIOS:
            click.echo(f"{scenario.name:16}{scenario.title}")
        return
    if unknown := set(wanted) - {scenario.name for scenario in SCENARIOS}:
        raise click.UsageError(f"no scenario {', '.join(sorted(unknown))}; --list names them")
    chosen = [scenario for scenario in SCENARIOS if not wanted or scenario.name in wanted]
    leave_if_told = standing.exit_on_signals()
    started = time.monotonic()
    results: list[report.Result] = []
    write: report.Write = (lambda _: None) if told else click.echo
    try:
        with Lab(name, backend=backend) as running:
            write(report.opening(running))
            for number, scenario in enumerate(chosen, 1):
                leave_if_told()
                place = f"{number}/{len(chosen)}"
                results.append(report.run_scenario(running, scenario, place, write))
            seconds = time.monotonic() - started
            write(f"\n{report.summary(results, seconds)}")
            if told:
                echo_json(documents.demonstrated(name, running.backend, results, seconds))
            if keep:
                _keep(name)
            else:
                write(LOOK_YOURSELF)
    except (Unmet, AlreadyRunning, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if not all(it.well for it in results):
        raise SystemExit(1)


def _keep(name: str) -> None:
    click.echo(
        "\nThe lab stands as the last scenario left it. From another terminal:\n"
        f"  pykubeproxy lab status --name {name}\n"
        f"  pykubeproxy lab exec --name {name} node1 -- pykubeproxy dump-rules\n"
        "Ctrl-C takes it down.",
        err=True,
    )
    try:
        signal.pause()
    except KeyboardInterrupt:
        click.echo()


@lab.command(short_help="Build a lab and leave it standing.")
@click.option("--name", default="lab", show_default=True, help="Its name; several may stand side by side.")
@backend_option
@click.option("--pods", type=click.IntRange(0, 50), default=3, show_default=True, help="Pods of the app web.")
@output_option
def up(name: str, backend: str, pods: int, output: str) -> None:
    """Build a lab and leave it standing: a Service "web" with pods behind it, to play with.

    \b
    sudo pykubeproxy lab up
    sudo pykubeproxy lab exec client -- curl -s http://10.0.0.11:NODEPORT/
    sudo pykubeproxy lab down
    """
    try:
        standing.up(name, backend, pods)
        _show(RunDirectory(name), output)
    except (Unmet, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from None


@lab.command()
@click.option("--name", default="lab", show_default=True, help="Which lab.")
@output_option
def down(name: str, output: str) -> None:
    """Take a lab down, also one whose driver died.

    \b
    sudo pykubeproxy lab down
    """
    try:
        there = standing.down(name)
    except (Unmet, AlreadyRunning, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if output == "json":
        echo_json(documents.removed(name, there))
    else:
        click.echo(f"lab {name} is gone" if there else f"there is no lab {name}")


@lab.command(
    "exec",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Run a command inside a node, a pod or the client.",
)
@click.option("--name", help="Which lab, if there are several.")
@click.argument("place", metavar="NODE|POD|client|fabric")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def execute(name: str | None, place: str, command: tuple[str, ...]) -> None:
    """Run a command inside a node, a pod, the client or the fabric; a shell if none is given.

    \b
    sudo pykubeproxy lab exec node1 -- pykubeproxy dump-rules default/web
    sudo pykubeproxy lab exec client -- curl -s http://10.0.0.11:NODEPORT/
    sudo pykubeproxy lab exec web-1 -- ip route
    """
    wanted = list(command[1:] if command[:1] == ("--",) else command) or ["sh"]
    try:
        standing.execute(standing.only_lab(name), place, wanted)
    except Unmet as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{wanted[0]}: {error.strerror}") from None


@lab.command()
@click.option("--name", help="Which lab, if there are several.")
@output_option
def status(name: str | None, output: str) -> None:
    """Show the nodes, pods and Services of a lab that stands.

    \b
    sudo pykubeproxy lab status
    """
    try:
        _show(standing.only_lab(name), output)
    except Unmet as error:
        raise click.ClickException(str(error)) from None


def _show(directory: RunDirectory, output: str) -> None:
    state: dict[str, Any] = directory.read_state()
    api = Api(f"{prefix(directory.lab)}fabric", FABRIC[0], API_PORT)
    services, logs = api.items(SERVICES), str(directory.path / "logs")
    if output == "json":
        echo_json(documents.standing(state, services, logs))
    else:
        click.echo(report.overview(state, services, logs))
