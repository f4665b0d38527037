"""A bill of materials as text."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from uuid import NAMESPACE_URL, UUID, uuid5

from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

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
