"""Measure pykubeproxy's other commands on a node where its agent runs."""

import subprocess
import time
from collections.abc import Iterator, Sequence

from tests.bench import figures as f
from tests.bench import workload
from tests.bench.program import Place, Program

# What a start in a pod and one with a kubeconfig cannot do without.
_POD_IMPORTS, _KUBECONFIG_IMPORTS = "import click, msgspec, urllib3, ssl, json", "import kubernetes.config"
_LONGEST = 300.0


class CommandFailed(RuntimeError):
    """A command failed; the text has its exit code and the last line of its output."""


def imports(there: Place, program: Program) -> float:
    """Return the seconds of a Python process that only does the imports that a start needs at least."""
    assert program.checkout is not None
    statement = _KUBECONFIG_IMPORTS if program.kubeconfig else _POD_IMPORTS
    return _run(there, program, [program.checkout.python, "-P", "-c", statement])


def seconds(there: Place, program: Program, *arguments: str, codes: Sequence[int] = (0,)) -> float:
    """Return the seconds of a command of pykubeproxy. Raise CommandFailed for other exit codes."""
    return _run(there, program, program.command(*arguments), codes)


def lookups(there: Place, program: Program, repeat: int) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield the seconds of the commands that look at one Service."""
    number = there.cluster.size.services // 2
    service = workload.service_name(number)
    for name, arguments in (
        (f.DUMP, ("dump-rules", service)),
        (f.TRACE, ("trace", workload.pod(0), f"{workload.vip(number)}:{workload.SERVICE_PORT}")),
        (f.EXPLAIN, ("explain", service)),
    ):
        yield name, tuple(seconds(there, program, *arguments) for _ in range(repeat))


def inspections(there: Place, program: Program) -> Iterator[tuple[str, float]]:
    """Yield the seconds of check and diff, with the objects of the API server and of the agent."""
    config = ("--config", str(there.configuration))
    # check may have a finding about the machine, such as a kernel without a feature.
    yield f.CHECK, seconds(there, program, "check", *config, codes=(0, 1))
    yield f.DIFF, seconds(there, program, "diff", *config)
    yield f.DIFF_AGENT, seconds(there, program, "diff")


def save_seconds(there: Place) -> float:
    """Return the seconds of iptables-save and ip6tables-save, one after the other."""
    with there.node.entered():
        started = time.monotonic()
        for command in ("iptables-save", "ip6tables-save"):
            subprocess.run(
                [command, "-c"],
                stdout=subprocess.DEVNULL,
                check=True,
                env=there.environment,
                timeout=_LONGEST,
            )
        return time.monotonic() - started


def _run(there: Place, program: Program, command: Sequence[str], codes: Sequence[int] = (0,)) -> float:
    placed = there.command(program, list(command))
    with there.node.entered():
        started = time.monotonic()
        outcome = subprocess.run(
            placed, capture_output=True, text=True, env=there.environment, timeout=_LONGEST, check=False
        )
        taken = time.monotonic() - started
    if outcome.returncode not in codes:
        last = (outcome.stderr.strip() or outcome.stdout.strip() or "no output").splitlines()[-1]
        raise CommandFailed(f"{command[-1]} exited with status {outcome.returncode}: {last[:300]}")
    return taken
