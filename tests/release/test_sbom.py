"""Bills of materials name every package, match CycloneDX's schema and are reproducible."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.component import Component

from tests import sbom
from tests.sbom.document import document

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
    return {it["purl"] for it in content["components"]}


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
    required = {it["ref"]: it.get("dependsOn", []) for it in content["dependencies"]}
    assert required["pkg:pypi/pykubeproxy@0.1.0"] == ["pkg:pypi/pyyaml@6.0.3", "pkg:pypi/routes@2"]
    assert required.get("pkg:pypi/routes@2", []) == []
    licenses = {it["name"]: it["licenses"] for it in content["components"]}
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
    required = {it["ref"]: it.get("dependsOn", []) for it in content["dependencies"]}
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


def test_invalid_document_is_refused() -> None:
    """A hash of another length violates the schema."""
    subject = Component(name="b")
    wrong = Component(name="a", hashes=[HashType(alg=HashAlgorithm.SHA_256, content="12")])
    with pytest.raises(ValueError, match="does not match the schema"):
        document(subject, {subject: [wrong]}, [wrong], datetime.fromtimestamp(DATE, UTC))
