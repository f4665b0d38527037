"""The revisions of pykubeproxy to measure: this checkout, and with --against another one."""

import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parents[2]
_MAIN = "from pykubeproxy.cli import main; main()"


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


def this_checkout() -> Checkout:
    """Return the checkout that this program runs from."""
    return _compiled(Checkout(_HERE, sys.executable))


@contextmanager
def other_checkout(revision: str) -> Iterator[Checkout]:
    """Check out a git revision, or use the folder of a checkout with its .venv.

    If the dependencies of the revision differ from those here, install them. Raise NoRevision.
    """
    folder = Path(revision).absolute()
    if folder.is_dir():
        if not (folder / "pykubeproxy/__init__.py").is_file():
            raise NoRevision(f"{folder} is no checkout of pykubeproxy")
        yield _compiled(Checkout(folder, _python_of(folder)))
        return
    with tempfile.TemporaryDirectory(prefix="pykubeproxy-bench-") as temporary:
        folder = Path(temporary, "checkout")
        _git("worktree", "add", "--detach", str(folder), revision)
        try:
            yield _compiled(Checkout(folder, _python_of(folder)))
        finally:
            _git("worktree", "remove", "--force", str(folder))


def _python_of(folder: Path) -> str:
    """Return the interpreter of the folder's .venv, else the current one. Create a .venv if dependencies differ."""
    python = folder / ".venv/bin/python"
    if python.exists():
        return str(python)
    if _dependencies(folder) == _dependencies(_HERE):
        return sys.executable
    subprocess.run([sys.executable, "-m", "venv", str(folder / ".venv")], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--editable", f"{folder}[node]"]
    subprocess.run(install, check=True)
    return str(python)


def _dependencies(folder: Path) -> tuple[object, object]:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project["dependencies"], project["optional-dependencies"]


def _compiled(checkout: Checkout) -> Checkout:
    """Write the bytecode, so that the first start is like the others."""
    package = str(checkout.folder / "pykubeproxy")
    subprocess.run([checkout.python, "-m", "compileall", "-q", package], check=True)
    return checkout


def _git(*arguments: str) -> None:
    # Root may run this in the checkout of another user.
    command = ["git", "-c", f"safe.directory={_HERE}", "-C", str(_HERE), *arguments]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode:
        raise NoRevision(outcome.stderr.strip() or "git failed")
