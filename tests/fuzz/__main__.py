"""Fuzz the parsers of untrusted input: `python -m tests.fuzz [--seconds N] [--engine E] [TARGET...]`.

Writes failing inputs to tests/data/fuzz/TARGET/, and `make test` runs them from then on.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.targets import TARGETS, Target, inputs

CASES = Path(__file__).parents[1] / "data" / "fuzz"
_EXAMPLES = 400


def main() -> int:
    """Return 1 if a target failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"one of {', '.join(TARGETS)} (default: all)"
    )
    parser.add_argument(
        "--seconds", type=float, default=180, help="total seconds for all targets (default: 180)"
    )
    parser.add_argument("--engine", choices=["hypothesis", "atheris"], default="hypothesis")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="seed for hypothesis")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"unknown target: {', '.join(sorted(unknown))}")
    names = options.targets or list(TARGETS)
    share = options.seconds / len(names)
    print(f"{len(names)} targets, {share:.0f} s each, seed {options.seed}", flush=True)
    failed = 0
    for name in names:
        run = _coverage_guided if options.engine == "atheris" else _random
        failed += run(TARGETS[name], share, options.seed)
    return 1 if failed else 0


def _random(target: Target, seconds: float, first: int) -> int:
    begun, count = time.monotonic(), 0
    last: list[bytes] = []

    def body(raw: bytes) -> None:
        nonlocal count
        count += 1
        last[:] = [raw]
        target.run(raw)

    number = first
    while time.monotonic() - begun < seconds:
        test = settings(
            max_examples=_EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        )(seed(number)(given(inputs(target))(body)))
        number += 1
        try:
            test()
        except Exception:
            traceback.print_exc()
            print(f"{target.name}: failed, input saved as {_save(target, last[0])}", flush=True)
            return 1
    print(f"{target.name}: {count} inputs in {time.monotonic() - begun:.0f} s", flush=True)
    return 0


def _save(target: Target, raw: bytes) -> Path:
    folder = CASES / target.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(raw).hexdigest()[:12]
    path.write_bytes(raw)
    return path


def _coverage_guided(target: Target, seconds: float, first: int) -> int:
    """Run atheris, which needs a process of its own."""
    folder = CASES / target.name
    folder.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={max(1, int(seconds))}",
        f"-seed={first % 2**31}",
        f"-artifact_prefix={folder}/",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "tests.fuzz.guided", target.name, scratch, *options]
        code = subprocess.run(command).returncode
    if not any(folder.iterdir()):
        folder.rmdir()
    print(f"{target.name}: {'failed' if code else 'passed'}", flush=True)
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())
