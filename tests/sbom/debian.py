"""The Debian packages of a root file system, as CycloneDX components."""

import subprocess
from pathlib import Path

from cyclonedx.model.component import Component
from packageurl import PackageURL

_FIELDS = ("Package", "Version", "Architecture", "source:Package", "source:Version", "db:Status-Status")


def packages(root: Path) -> list[Component]:
    """Return the installed packages. Their package URLs have the release and, if it differs, the source package."""
    release = _release(root)
    line = "\\t".join(f"${{{it}}}" for it in _FIELDS)
    command = ["dpkg-query", f"--admindir={root}/var/lib/dpkg", "--show", f"--showformat={line}\\n"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [dict(zip(_FIELDS, line.split("\t"), strict=True)) for line in lines]
    return [_component(row, release) for row in rows if row["db:Status-Status"] == "installed"]


def _release(root: Path) -> str:
    """Return the distribution, such as debian-12."""
    lines = (root / "etc/os-release").read_text().splitlines()
    fields = {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines)}
    return f"{fields['ID']}-{fields['VERSION_ID']}"


def _component(row: dict[str, str], release: str) -> Component:
    name, version, architecture, source, source_version, _ = (row[it] for it in _FIELDS)
    qualifiers = {"arch": architecture, "distro": release}
    if (source, source_version) != (name, version):
        # Debian lists vulnerabilities by source package.
        qualifiers["upstream"] = source if source_version == version else f"{source}@{source_version}"
    purl = PackageURL("deb", "debian", name, version, qualifiers)
    return Component(name=name, version=version, purl=purl, bom_ref=str(purl))
