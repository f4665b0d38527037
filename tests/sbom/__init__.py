"""Software bills of materials of a wheel and of an image, in CycloneDX's JSON format.

SOURCE_DATE_EPOCH is their date; the default is now.
"""

import hashlib
import os
import time
from datetime import UTC, datetime
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.component import Component, ComponentType

from tests.sbom import debian, python
from tests.sbom.document import document


def wheel(file: Path, site: Path) -> str:
    """Return the document of a wheel that is installed with its requirements in a site-packages folder."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    program, required = python.packages(site, [HashType(alg=HashAlgorithm.SHA_256, content=digest)])
    return document(program, required, (), _date())


def image(root: Path) -> str:
    """Return the document of an image with this root file system: Debian packages and the agent's Python packages."""
    (site,) = root.glob("opt/pykubeproxy/lib/python3*/site-packages")
    program, required = python.packages(site)
    subject = Component(
        name=program.name, version=program.version, type=ComponentType.CONTAINER, bom_ref="image"
    )
    system = debian.packages(root)
    return document(subject, {subject: [program, *system], **required}, system, _date())


def _date() -> datetime:
    return datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH") or time.time()), UTC)
