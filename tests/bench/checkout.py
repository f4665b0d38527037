"""The revisions of pykubeproxy to measure: this checkout, and with --against another one."""

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parents[2]
_MAIN = "from pykubeproxy.cli import main; main()"
#: Return the interpreter for the folder of a checkout.
Interpreter = Callable[[Path], str]


class NoRevision(RuntimeError):
    """The revision cannot be measured; the text says why."""


@dataclass(frozen=True)
class Checkout:
    """A folder with pykubeproxy, and the interpreter that has its dependencies."""

    folder: Path
    python: str

    @property
    def command(self) -> tuple[str, ...]:
        """The command line of pykubeproxy, without a command. Never imports from the current folder."""
        return (self.python, "-P", "-c", _MAIN)

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that make the interpreter use this folder."""
        return {"PYTHONPATH": str(self.folder)}


def current_python(_folder: Path) -> str:
    """Return the interpreter that runs this program, with all development tools."""
    return sys.executable


def image_python(folder: Path, venvs: Path = _HERE / "build/bench") -> str:
    """Return an interpreter that has only the packages of the checkout's image.

    The first use installs them, in some 20 s; later ones reuse them while requirements.txt is unchanged. Raise NoRevision.
    """
    requirements = folder / "requirements.txt"
    if not requirements.is_file():
        raise NoRevision(f"{folder} has no requirements.txt, which names the packages of the image")
    key = hashlib.sha256(sys.version.encode() + requirements.read_bytes()).hexdigest()[:12]
    venv = venvs / f"venv-{key}"
    python, complete = venv / "bin/python", venv / ".complete"
    if not complete.exists():
        print(f"installing the packages of {requirements} in {venv}", file=sys.stderr)
        _run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(venv))
        install = ("install", "--quiet", "--require-hashes", "-r", str(requirements))
        _run(sys.executable, "-m", "pip", "--python", str(python), *install)
        complete.touch()
    return str(python)


def this_checkout(interpreter: Interpreter) -> Checkout:
    """Return the checkout that this program runs from. Raise NoRevision."""
    return _compiled(Checkout(_HERE, interpreter(_HERE)))


@contextmanager
def other_checkout(revision: str, interpreter: Interpreter) -> Iterator[Checkout]:
    """Check out a git revision, or use the folder of a checkout. Raise NoRevision."""
    folder = Path(revision).absolute()
    if folder.is_dir():
        if not (folder / "pykubeproxy/__init__.py").is_file():
            raise NoRevision(f"{folder} is no checkout of pykubeproxy")
        yield _compiled(Checkout(folder, interpreter(folder)))
        return
    with tempfile.TemporaryDirectory(prefix="pykubeproxy-bench-") as temporary:
        folder = Path(temporary, "checkout")
        _git("worktree", "add", "--detach", str(folder), revision)
        try:
            yield _compiled(Checkout(folder, interpreter(folder)))
        finally:
            _git("worktree", "remove", "--force", str(folder))


def _compiled(checkout: Checkout) -> Checkout:
    """Write the bytecode, so that the first start is like the others."""
    package = str(checkout.folder / "pykubeproxy")
    subprocess.run([checkout.python, "-m", "compileall", "-q", package], check=True)
    return checkout


def _git(*arguments: str) -> None:
    # Root may run this in the checkout of another user.
    _run("git", "-c", f"safe.directory={_HERE}", "-C", str(_HERE), *arguments)


def _run(*command: str) -> None:
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode:
        raise NoRevision(outcome.stderr.strip() or f"{command[0]} failed")
