"""The Python packages in a folder, as CycloneDX components."""

import re
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageMetadata, distributions
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashType
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.sbom.document import Dependencies

PROGRAM = "pykubeproxy"
_CLASSIFIER = re.compile(r"License :: (?:.* :: )?(?P<name>[^:]+)")
_MAX_NAME = 60  # characters; a longer text is the license itself


def packages(folder: Path, hashes: Iterable[HashType] = ()) -> tuple[Component, Dependencies]:
    """Return the program, which has these hashes, and all packages of a site-packages folder with their requirements."""
    found = {canonicalize_name(it.name): it for it in distributions(path=[str(folder)])}
    components = {name: _component(name, it, hashes if name == PROGRAM else ()) for name, it in found.items()}
    required = {
        components[name]: [components[other] for other in _required(it) if other in components]
        for name, it in found.items()
    }
    return components[PROGRAM], required


def _component(name: str, distribution: Distribution, hashes: Iterable[HashType]) -> Component:
    purl = PackageURL("pypi", None, name, distribution.version)
    return Component(
        name=name,
        version=distribution.version,
        type=ComponentType.APPLICATION if name == PROGRAM else ComponentType.LIBRARY,
        description=distribution.metadata.get("Summary"),
        licenses=list(_licenses(distribution.metadata)),
        hashes=hashes,
        purl=purl,
        bom_ref=str(purl),
    )


def _licenses(metadata: PackageMetadata) -> Iterator[License]:
    """Yield the license expression, or else the name of the license, or else those of the classifiers."""
    make = LicenseFactory().make_from_string
    named = metadata.get("License-Expression") or metadata.get("License") or ""
    if named and "\n" not in named and len(named) <= _MAX_NAME:
        yield make(named)
        return
    for classifier in metadata.get_all("Classifier", []):
        if match := _CLASSIFIER.fullmatch(classifier):
            yield make(match["name"])


def _required(distribution: Distribution) -> Iterator[str]:
    """Yield the names of the packages that a package requires: the program with its extra `node`, others without any."""
    is_program = canonicalize_name(distribution.name) == PROGRAM
    for text in distribution.requires or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if "extra" not in str(marker) or (is_program and marker and marker.evaluate({"extra": "node"})):
            yield canonicalize_name(requirement.name)
