"""Write the bill of materials of a wheel or of an image, in CycloneDX's JSON format.

SOURCE_DATE_EPOCH is its date; the default is now.
"""

import argparse
import hashlib
import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import Distribution, PackageMetadata, distributions
from pathlib import Path
from uuid import NAMESPACE_URL, UUID, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# The direct dependencies of each component.
Dependencies = Mapping[Component, Sequence[Component]]


def document(subject: Component, required: Dependencies, others: Iterable[Component], date: datetime) -> str:
    """Return the document of a subject and its components, in JSON. The same components and date give the same text.

    Raises ValueError if it does not match CycloneDX's schema.
    """
    metadata = BomMetaData(component=subject, timestamp=date)
    components = {*required, *others} - {subject}
    bom = Bom(metadata=metadata, components=components, serial_number=UUID(int=0))
    for component in (subject, *components):
        bom.register_dependency(component, required.get(component, ()))
    bom.serial_number = uuid5(NAMESPACE_URL, JsonV1Dot6(bom).output_as_string())
    text = JsonV1Dot6(bom).output_as_string(indent=2) + "\n"
    if fault := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise ValueError(f"the bill of materials of {subject.name} does not match the schema: {fault}")
    return text


PROGRAM = "pykubeproxy"
_CLASSIFIER = re.compile(r"License :: (?:.* :: )?(?P<name>[^:]+)")
_MAX_NAME = 60  # characters; a longer text is the license itself


def python_packages(folder: Path, hashes: Iterable[HashType] = ()) -> tuple[Component, Dependencies]:
    """Return the program, which has these hashes, and all packages of a site-packages folder with their requirements."""
    found = {str(canonicalize_name(item.name)): item for item in distributions(path=[str(folder)])}
    components = {
        name: _python_component(name, item, hashes if name == PROGRAM else ()) for name, item in found.items()
    }
    required = {
        components[name]: [components[other] for other in _required(item) if other in components]
        for name, item in found.items()
    }
    return components[PROGRAM], required


def _python_component(name: str, distribution: Distribution, hashes: Iterable[HashType]) -> Component:
    purl = PackageURL("pypi", None, name, distribution.version)
    return Component(
        name=name,
        version=distribution.version,
        type=ComponentType.APPLICATION if name == PROGRAM else ComponentType.LIBRARY,
        description=_field(distribution.metadata, "Summary") or None,
        licenses=list(_licenses(distribution.metadata)),
        hashes=hashes,
        purl=purl,
        bom_ref=str(purl),
    )


def _licenses(metadata: PackageMetadata) -> Iterator[License]:
    """Yield the license expression, or else the name of the license, or else those of the classifiers."""
    make = LicenseFactory().make_from_string
    named = _field(metadata, "License-Expression") or _field(metadata, "License")
    if named and "\n" not in named and len(named) <= _MAX_NAME:
        yield make(named)
        return
    for classifier in metadata.get_all("Classifier", []):
        if match := _CLASSIFIER.fullmatch(classifier):
            yield make(match["name"])


def _field(metadata: PackageMetadata, name: str) -> str:
    """Return the value of a field, or nothing if the package has none."""
    return metadata[name] if name in metadata else ""  # noqa: SIM401 - the type has no get


def _required(distribution: Distribution) -> Iterator[str]:
    """Yield the names of the packages that a package requires: the program with its extra `node`, others without any."""
    is_program = canonicalize_name(distribution.name) == PROGRAM
    for text in distribution.requires or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if "extra" not in str(marker) or (is_program and marker and marker.evaluate({"extra": "node"})):
            yield canonicalize_name(requirement.name)


_FIELDS = ("Package", "Version", "Architecture", "source:Package", "source:Version", "db:Status-Status")


def debian_packages(root: Path) -> list[Component]:
    """Return the installed packages. Their package URLs have the release and, if it differs, the source package."""
    release = _release(root)
    line = "\\t".join(f"${{{item}}}" for item in _FIELDS)
    command = ["dpkg-query", f"--admindir={root}/var/lib/dpkg", "--show", f"--showformat={line}\\n"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [dict(zip(_FIELDS, line.split("\t"), strict=True)) for line in lines]
    return [_debian_component(row, release) for row in rows if row["db:Status-Status"] == "installed"]


def _release(root: Path) -> str:
    """Return the distribution, such as debian-12."""
    lines = (root / "etc/os-release").read_text().splitlines()
    fields = {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines)}
    return f"{fields['ID']}-{fields['VERSION_ID']}"


def _debian_component(row: dict[str, str], release: str) -> Component:
    name, version, architecture, source, source_version, _ = (row[item] for item in _FIELDS)
    qualifiers = {"arch": architecture, "distro": release}
    if (source, source_version) != (name, version):
        # Debian lists vulnerabilities by source package.
        qualifiers["upstream"] = source if source_version == version else f"{source}@{source_version}"
    purl = PackageURL("deb", "debian", name, version, qualifiers)
    return Component(name=name, version=version, purl=purl, bom_ref=str(purl))


def wheel(file: Path, site: Path) -> str:
    """Return the document of a wheel that is installed with its requirements in a site-packages folder."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    program, required = python_packages(site, [HashType(alg=HashAlgorithm.SHA_256, content=digest)])
    return document(program, required, (), _date())


def image(root: Path) -> str:
    """Return the document of an image with this root file system: Debian packages and the agent's Python packages."""
    (site,) = root.glob("opt/pykubeproxy/lib/python3*/site-packages")
    program, required = python_packages(site)
    subject = Component(
        name=program.name, version=program.version, type=ComponentType.CONTAINER, bom_ref="image"
    )
    system = debian_packages(root)
    return document(subject, {subject: [program, *system], **required}, system, _date())


def _date() -> datetime:
    return datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH") or time.time()), UTC)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.sbom", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    of_wheel = commands.add_parser("wheel", help="describe a wheel")
    of_wheel.add_argument("file", type=Path)
    of_wheel.add_argument("site", type=Path, help="the site-packages folder in which it is installed")
    of_image = commands.add_parser("image", help="describe an image")
    of_image.add_argument("root", type=Path, help="its root file system")
    for command in (of_wheel, of_image):
        command.add_argument("output", type=Path)
    arguments = parser.parse_args()
    text = wheel(arguments.file, arguments.site) if arguments.command == "wheel" else image(arguments.root)
    arguments.output.write_text(text)


if __name__ == "__main__":
    main()
