"""`make dist` builds complete, reproducible packages that run, with a bill of materials."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

import pykubeproxy
from tests import sbom

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
    assert {"tests/conftest.py", "tests/setup/packages.sh", "docs/index.md", "requirements/node.txt"} <= names
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


PACKAGES = {
    "pykubeproxy": "Version: 0.1.0\nLicense-Expression: Apache-2.0\nRequires-Dist: PyYAML>=6\n"
    "Requires-Dist: colors; extra == 'tty'\nRequires-Dist: routes; extra == 'node'\nRequires-Dist: absent; python_version < '3'\n",
    "PyYAML": "Version: 6.0.3\nLicense: MIT\n",
    "routes": "Version: 2\nLicense: MIT\nRequires-Dist: colors; extra == 'node'\n",
    "colors": "Version: 1\nLicense: a text\n        of two lines\nClassifier: License :: OSI Approved :: BSD License\n",
}
STATUS = """Package: iptables
Status: install ok installed
Architecture: amd64
Version: 1.8.9-2

Package: libc6
Status: install ok installed
Architecture: amd64
Source: glibc
Version: 2.36-9+deb12u14

Package: python3
Status: install ok installed
Architecture: amd64
Source: python3-defaults (3.11.2-1)
Version: 3.11.2-1+b1

Package: removed
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""
DATE = 1717200000


@pytest.fixture(autouse=True)
def date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(DATE))


def site(folder: Path) -> Path:
    """Return a site-packages folder with PACKAGES."""
    for name, metadata in PACKAGES.items():
        info = folder / f"{name.lower()}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\n{metadata}")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root file system with the packages of STATUS and PACKAGES."""
    site(tmp_path / "opt/pykubeproxy/lib/python3.11/site-packages")
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text(STATUS)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text('ID=debian\nVERSION_ID="12"\n')
    return tmp_path


def purls(content: dict[str, Any]) -> set[str]:
    return {item["purl"] for item in content["components"]}


def test_wheel_is_listed_with_its_requirements(tmp_path: Path) -> None:
    """The subject is the wheel with its hash.

    Requirements of its extra `node` are dependencies; other optional and absent ones are not.
    """
    wheel = tmp_path / "wheel"
    wheel.write_bytes(b"contents")
    content = json.loads(sbom.wheel(wheel, site(tmp_path / "site")))
    subject = content["metadata"]["component"]
    assert (subject["purl"], subject["type"]) == ("pkg:pypi/pykubeproxy@0.1.0", "application")
    (digest,) = subject["hashes"]
    assert digest == {
        "alg": "SHA-256",
        "content": "d1b2a59fbea7e20077af9f91b27e95e865061b270be03ff539ab3b73587882e8",
    }
    assert purls(content) == {"pkg:pypi/pyyaml@6.0.3", "pkg:pypi/routes@2", "pkg:pypi/colors@1"}
    required = {item["ref"]: item.get("dependsOn", []) for item in content["dependencies"]}
    assert required["pkg:pypi/pykubeproxy@0.1.0"] == ["pkg:pypi/pyyaml@6.0.3", "pkg:pypi/routes@2"]
    assert required.get("pkg:pypi/routes@2", []) == []
    licenses = {item["name"]: item["licenses"] for item in content["components"]}
    assert licenses == {
        "pyyaml": [{"license": {"id": "MIT"}}],
        "routes": [{"license": {"id": "MIT"}}],
        "colors": [{"license": {"name": "BSD License"}}],
    }


def test_image_lists_debian_and_python_packages(root: Path) -> None:
    """Package URLs have the architecture, the release and a source package of another name or version."""
    content = json.loads(sbom.image(root))
    assert content["metadata"]["component"]["type"] == "container"
    assert purls(content) == {
        "pkg:pypi/pykubeproxy@0.1.0",
        "pkg:pypi/pyyaml@6.0.3",
        "pkg:pypi/routes@2",
        "pkg:pypi/colors@1",
        "pkg:deb/debian/iptables@1.8.9-2?arch=amd64&distro=debian-12",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=amd64&distro=debian-12&upstream=glibc",
        "pkg:deb/debian/python3@3.11.2-1%2Bb1?arch=amd64&distro=debian-12&upstream=python3-defaults%403.11.2-1",
    }
    required = {item["ref"]: item.get("dependsOn", []) for item in content["dependencies"]}
    assert len(required["image"]) == 4


def test_same_packages_and_date_give_the_same_document(root: Path, tmp_path: Path) -> None:
    """In another process too. The serial number depends on the content, and the date is SOURCE_DATE_EPOCH."""
    once = sbom.image(root)
    command = [sys.executable, "-m", "tests.sbom", "image", str(root), str(tmp_path / "again")]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True)
    assert (tmp_path / "again").read_text() == once
    assert json.loads(once)["metadata"]["timestamp"] == "2024-06-01T00:00:00+00:00"
    status = root / "var/lib/dpkg/status"
    status.write_text(status.read_text().replace("1.8.9-2", "1.8.9-3"))
    assert json.loads(sbom.image(root))["serialNumber"] != json.loads(once)["serialNumber"]
