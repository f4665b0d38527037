"""`make dist` builds complete, reproducible packages that run."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import pykubeproxy

ROOT = Path(__file__).parents[2]
OBJECTS = ROOT / "tests" / "data" / "manifests"


def build(folder: Path, tree: Path = ROOT) -> tuple[Path, Path]:
    """Build wheel and sdist of a tree with a fixed date."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1717200000"}
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheel and sdist of this tree."""
    return build(tmp_path_factory.mktemp("dist"))


def test_wheel_has_exactly_the_package(built: tuple[Path, Path]) -> None:
    """The wheel has every file of the package, including py.typed, and no others."""
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    kept = (path for path in (ROOT / "pykubeproxy").rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert names == {str(path.relative_to(ROOT)) for path in kept}
    assert "pykubeproxy/py.typed" in names


def test_wheel_metadata(built: tuple[Path, Path]) -> None:
    """The metadata has name, version, license and the README as description."""
    with zipfile.ZipFile(built[0]) as wheel:
        info = f"pykubeproxy-{pykubeproxy.__version__}.dist-info"
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
        licenses = [name for name in wheel.namelist() if name.startswith(f"{info}/licenses/")]
    assert (metadata["Name"], metadata["Version"]) == ("pykubeproxy", pykubeproxy.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert licenses == [f"{info}/licenses/LICENSE"]
    assert str(metadata.get_payload()).startswith("# pykubeproxy")


def test_sdist_has_sources_and_tests(built: tuple[Path, Path]) -> None:
    """The sdist has what `make test` needs and no build results."""
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "Makefile", "README.md", "LICENSE", "CHANGELOG.md", "mkdocs.yml"} <= names
    assert {"tests/conftest.py", "tests/setup/packages.sh", "docs/index.md", "requirements.txt"} <= names
    assert not [name for name in names if name.startswith((".venv/", "build/", "dist/", ".git/"))]
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_builds_are_reproducible(built: tuple[Path, Path], tmp_path: Path) -> None:
    """A build from the sdist gives the same bytes."""
    with tarfile.open(built[1]) as sdist:
        sdist.extractall(tmp_path)
    (tree,) = tmp_path.iterdir()
    once, again = build(tmp_path / "once", tree), build(tmp_path / "again", tree)
    assert [path.read_bytes() for path in once] == [path.read_bytes() for path in again]
    assert once[0].read_bytes() == built[0].read_bytes()


def test_wheel_runs(built: tuple[Path, Path], tmp_path: Path) -> None:
    """The wheel runs in a clean environment outside the checkout, with this environment's dependencies."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        str(built[0]),
    ]
    subprocess.run([sys.executable, *install], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Last on the path, so that Python imports the package of the wheel.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    where = run(str(python), "-c", "import pykubeproxy; print(pykubeproxy.__file__)")
    assert where == str(site / "pykubeproxy" / "__init__.py")
    program = str(python.parent / "pykubeproxy")
    assert run(program, "--version") == f"pykubeproxy {pykubeproxy.__version__}"
    assert "KUBE-SERVICES" in run(program, "render", "-f", str(OBJECTS), "--hostname-override", "node1")
