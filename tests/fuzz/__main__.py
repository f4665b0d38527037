"""Fuzz the readers of foreign input for a while: `python -m tests.fuzz [--seconds N] [--engine E] [TARGET...]`.

What breaks a reader is written to tests/data/fuzz/TARGET/, where `make test` finds it for good.
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

from tests.fuzz.mutations import inputs
from tests.fuzz.targets import TARGETS, Target

CASES = Path(__file__).parents[1] / "data" / "fuzz"
_EXAMPLES = 400


def main() -> int:
    """Returns 1 if anything broke."""
    asked = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    asked.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all of them")
    asked.add_argument("--seconds", type=float, default=180, help="for all together (180)")
    asked.add_argument("--engine", choices=["hypothesis", "atheris"], default="hypothesis")
    asked.add_argument("--seed", type=int, default=int(time.time()), help="where hypothesis begins")
    given_ = asked.parse_args()
    if strangers := set(given_.targets) - set(TARGETS):
        asked.error(f"no such target: {', '.join(sorted(strangers))}")
    names = given_.targets or list(TARGETS)
    share = given_.seconds / len(names)
    print(f"{len(names)} targets, {share:.0f} s each, seed {given_.seed}", flush=True)
    broken = 0
    for name in names:
        run = _coverage_guided if given_.engine == "atheris" else _random
        broken += run(TARGETS[name], share, given_.seed)
    return 1 if broken else 0


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
            print(f"{target.name}: broken by {_kept(target, last[0])}", flush=True)
            return 1
    print(f"{target.name}: {count} inputs in {time.monotonic() - begun:.0f} s", flush=True)
    return 0


def _kept(target: Target, raw: bytes) -> Path:
    folder = CASES / target.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(raw).hexdigest()[:12]
    path.write_bytes(raw)
    return path


def _coverage_guided(target: Target, seconds: float, first: int) -> int:
    """With atheris, which has to have the process for itself."""
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
    print(f"{target.name}: {'broken' if code else 'fine'}", flush=True)
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())
