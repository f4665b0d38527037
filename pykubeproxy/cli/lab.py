"""`pykubeproxy lab`: a cluster on one machine."""

import signal
import time
from pathlib import Path

import click
from urllib3.exceptions import HTTPError

from pykubeproxy.cli.emit import emit, report_option
from pykubeproxy.cli.flags import backend_option
from pykubeproxy.cli.help import ACTION, DIFFERENT, Group, option
from pykubeproxy.cli.terminal import echo_styled
from pykubeproxy.lab import daemon, report
from pykubeproxy.lab.agents import kube_proxy_binary
from pykubeproxy.lab.api import SERVICES, Api
from pykubeproxy.lab.cluster import API_PORT
from pykubeproxy.lab.faults import FAULTS
from pykubeproxy.lab.machine import LabError, RunDirectory, lab_names
from pykubeproxy.lab.network import FABRIC, namespace_prefix
from pykubeproxy.lab.scenarios import SCENARIOS
from pykubeproxy.wording import counted, listed, suggestion, text_of


def _labs(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a lab."""
    return [name for name in lab_names() if name.startswith(incomplete)]


def _hosts(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete a host of the named lab, or of all."""
    given = ctx.params.get("name")
    states = (RunDirectory(name).read_state() for name in ([given] if given else lab_names()))
    names = {str(host["name"]) for state in states for host in state.get("hosts", ())}
    return sorted(name for name in names if name.startswith(incomplete))


def _scenarios(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a scenario."""
    return [scenario.name for scenario in SCENARIOS if scenario.name.startswith(incomplete)]


def _faults(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a fault."""
    return [fault.name for fault in FAULTS if fault.name.startswith(incomplete)]


lab_backend_option = backend_option(help="The iptables backend of the service proxies.", group=ACTION)

_INSPECT = """
To inspect a scenario, keep its lab and run commands on its nodes:
  pykubeproxy lab demo SCENARIO --keep
  pykubeproxy lab exec node1 -- pykubeproxy dump-rules"""


@click.group(cls=Group, short_help="Try the proxy in a cluster on this machine.")
def lab() -> None:
    """Try the proxy with two nodes, some pods and an outside client, all on this machine.

    The hosts are network namespaces. The cluster has a small API server, and an agent on each node. The lab needs
    root. It does not change the machine's own network, and it removes everything at its end.

    \b
    sudo pykubeproxy lab demo
    """


@lab.command(
    exit_codes={0: "All scenarios passed.", 1: "A scenario failed.", 2: "Not run: wrong usage or a failure."},
    short_help="Run scenarios with real connections.",
)
@click.argument("names", metavar="[SCENARIO]...", nargs=-1, shell_complete=_scenarios)
@option("--list", "list_only", is_flag=True, help="List the scenarios and exit.", group=ACTION)
@lab_backend_option
@option("--keep", is_flag=True, help="Keep the lab after the last scenario until Ctrl-C.", group=ACTION)
@option(
    "--name", help="The lab's name. By default demo, or demo2 and so on beside other demos.", group=ACTION
)
@report_option()
def demo(
    names: tuple[str, ...], list_only: bool, backend: str, keep: bool, name: str | None, output: str
) -> None:
    """Run all scenarios, or those named, and show what real connections observe.

    \b
    sudo pykubeproxy lab demo
    sudo pykubeproxy lab demo scale rolling-update --iptables-backend legacy
    """
    if list_only:
        emit(report.scenarios_report(SCENARIOS), output)
        return
    if unknown := set(names) - {scenario.name for scenario in SCENARIOS}:
        name = min(unknown)
        advice = (
            suggestion(name, (scenario.name for scenario in SCENARIOS)) or "use --list to see their names"
        )
        raise click.UsageError(f'there is no scenario "{name}"; {advice}')
    selected = [scenario for scenario in SCENARIOS if not names or scenario.name in names]
    check_signals = daemon.exit_on_signals()
    started = time.monotonic()
    results: list[report.ScenarioResult] = []
    write: report.Write = _write if output in ("text", "wide") else lambda _: None
    with daemon.demo_lab(name, backend) as running:
        write(report.introduction(running))
        for number, scenario in enumerate(selected, 1):
            check_signals()
            position = f"{number}/{len(selected)}"
            results.append(report.run_scenario(running, scenario, position, write))
        seconds = time.monotonic() - started
        write("")
        ok = all(result.ok for result in results)
        found = report.DemoReport(
            lab=running.name,
            backend=running.backend,
            ok=ok,
            seconds=round(seconds, 3),
            scenarios=tuple(results),
        )
        emit(found, output)
        if keep:
            _keep(running.name)
        else:
            write(_INSPECT)
    if not ok:
        raise SystemExit(DIFFERENT)


def _write(text: str) -> None:
    """Print lines of the demo, in which nothing is foreign."""
    echo_styled(text_of(text.split("\n")))


def _keep(name: str) -> None:
    click.echo(
        "\nThe lab stays as the last scenario left it. Run in another terminal:\n"
        f"  pykubeproxy lab status --name {name}\n"
        f"  pykubeproxy lab exec --name {name} node1 -- pykubeproxy dump-rules\n"
        "Press Ctrl-C to remove it.",
        err=True,
    )
    try:
        signal.pause()
    except KeyboardInterrupt:
        click.echo()


@lab.command(short_help="Start a lab in the background.")
@option(
    "--name",
    default="lab",
    show_default=True,
    help="The lab's name; labs can run side by side.",
    group=ACTION,
)
@lab_backend_option
@option(
    "--pods",
    type=click.IntRange(0, 50),
    default=3,
    show_default=True,
    help="Pods of the app web.",
    group=ACTION,
)
@option(
    "--kube-proxy",
    type=click.Path(exists=True, dir_okay=False, executable=True, path_type=Path),
    help="Run this kube-proxy on the nodes instead of agents.",
    group=ACTION,
)
@option(
    "--proxy-mode",
    type=click.Choice(["iptables", "nftables"]),
    help="The mode of --kube-proxy.  [default: iptables]",
    group=ACTION,
)
@report_option()
def up(
    name: str, backend: str, pods: int, kube_proxy: Path | None, proxy_mode: str | None, output: str
) -> None:
    """Start a lab in the background, with a Service "web", its pods and a pod "client".

    With --kube-proxy, the nodes run a genuine kube-proxy instead of agents, to compare both or to inspect its rules.

    \b
    sudo pykubeproxy lab up
    sudo pykubeproxy lab exec client -- curl -s http://CLUSTER-IP/
    sudo pykubeproxy lab exec outside -- curl -s http://10.0.0.11:NODEPORT/
    sudo pykubeproxy lab down
    """
    if proxy_mode and not kube_proxy:
        raise click.UsageError("--proxy-mode is the mode of a kube-proxy; add --kube-proxy PATH")
    binary = kube_proxy_binary(kube_proxy, proxy_mode or "iptables") if kube_proxy else None
    daemon.up(name, backend, pods, binary)
    _show(RunDirectory(name), output)


@lab.command()
@option(
    "--name", default="lab", show_default=True, shell_complete=_labs, help="The lab's name.", group=ACTION
)
def down(name: str) -> None:
    """Remove a lab, even if its driver process died.

    \b
    sudo pykubeproxy lab down
    """
    click.echo(f'Removed lab "{name}".' if daemon.down(name) else f'There is no lab "{name}".')


@lab.command("list", short_help="List the labs that run on this machine.")
@report_option()
def list_labs(output: str) -> None:
    """List the labs that run on this machine, those of `lab demo` too.

    \b
    sudo pykubeproxy lab list
    """
    emit(report.labs_report(daemon.running_labs()), output)


_name_option = option(
    "--name", shell_complete=_labs, help="The lab's name, if several labs are running.", group=ACTION
)


@lab.command(short_help="Stop the service proxy of a node, or a pod.")
@_name_option
@click.argument("host", metavar="NODE|POD", shell_complete=_hosts)
def stop(name: str | None, host: str) -> None:
    """Stop the service proxy of NODE; its rules stay. Or delete POD, as `kubectl delete pod` does.

    \b
    sudo pykubeproxy lab stop node1
    sudo pykubeproxy lab stop web-2
    """
    daemon.request(daemon.select_lab(name), "stop", host)
    click.echo(f"Stopped {host}.")


@lab.command(short_help="Start the service proxy of a node again.")
@_name_option
@click.argument("node", shell_complete=_hosts)
def start(name: str | None, node: str) -> None:
    """Start the service proxy of NODE, after `lab stop` or if it has ended.

    \b
    sudo pykubeproxy lab start node1
    """
    daemon.request(daemon.select_lab(name), "start", node)
    click.echo(f"Started {node}.")


@lab.command(short_help="Change the number of pods of the Service web.")
@_name_option
@click.argument("number", type=click.IntRange(0, 50))
def scale(name: str | None, number: int) -> None:
    """Start or delete pods of the app web until there are NUMBER.

    \b
    sudo pykubeproxy lab scale 5
    """
    daemon.request(daemon.select_lab(name), "scale", str(number))
    click.echo(f"web has {counted(number, 'pod')}.")


_FAULTS = "\n".join(f"{fault.name:<11} {fault.title}" for fault in FAULTS)


@lab.command(
    "break",
    short_help="Make connections to the Service web fail.",
    help=f"""Make a fault, to find it with the other commands; `lab mend` removes all faults.

    Each fails connections from the pod "client" to the Service "web" in its own way:

    \b
    {_FAULTS.replace(chr(10), chr(10) + "    ")}

    \b
    sudo pykubeproxy lab break link
    sudo pykubeproxy lab exec client -- curl -m 1 http://CLUSTER-IP/
    sudo pykubeproxy lab mend
    """,
)
@_name_option
@click.argument("fault", shell_complete=_faults)
def break_lab(name: str | None, fault: str) -> None:
    found = next((one for one in FAULTS if one.name == fault), None)
    if found is None:
        known = [one.name for one in FAULTS]
        raise click.UsageError(
            f'there is no fault "{fault}"; {suggestion(fault, known) or f"use one of {listed(known)}"}'
        )
    daemon.request(daemon.select_lab(name), "break", fault)
    click.echo(f"Now {found.title}.")


@lab.command(short_help="Remove all faults of `lab break`.")
@_name_option
def mend(name: str | None) -> None:
    """Remove all faults of `lab break`, and start the service proxies that have stopped.

    \b
    sudo pykubeproxy lab mend
    """
    daemon.request(daemon.select_lab(name), "mend")
    click.echo("Mended.")


@lab.command(
    "exec",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Run a command on a node, a pod or outside.",
)
@_name_option
@click.argument("host", metavar="NODE|POD|outside|fabric", shell_complete=_hosts)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def execute(name: str | None, host: str, command: tuple[str, ...]) -> None:
    """Run a command on a node, in a pod, outside the cluster or on the fabric between nodes; by default, a shell.

    \b
    sudo pykubeproxy lab exec node1 -- pykubeproxy dump-rules default/web
    sudo pykubeproxy lab exec outside -- curl -s http://10.0.0.11:NODEPORT/
    sudo pykubeproxy lab exec outside -- kubectl get pods -A
    sudo pykubeproxy lab exec client -- curl -s http://CLUSTER-IP/
    """
    words = list(command[1:] if command[:1] == ("--",) else command) or ["sh"]
    try:
        daemon.execute(daemon.select_lab(name), host, words)
    except OSError as error:
        raise click.ClickException(
            f"cannot run {words[0]} on {host}: {error.strerror}; use a command of this machine"
        ) from None


@lab.command()
@_name_option
@report_option()
def status(name: str | None, output: str) -> None:
    """Show the hosts and Services of a running lab.

    \b
    sudo pykubeproxy lab status
    """
    _show(daemon.select_lab(name), output)


def _show(directory: RunDirectory, output: str) -> None:
    api = Api(f"{namespace_prefix(directory.lab)}fabric", FABRIC[0], API_PORT)
    try:
        services = api.items(SERVICES)
    except (HTTPError, OSError):  # OSError: the namespace is gone
        raise LabError(
            f"the API server of lab {directory.lab} does not answer at {api.url};"
            f" see {directory.logs / 'apiserver.log'},"
            f" or remove the lab with `pykubeproxy lab down --name {directory.lab}`"
        ) from None
    emit(report.lab_report(directory.read_state(), services), output)
