"""The generated parts of the reference cover what the program has, and each has its place on a page."""

import json
import re

import jsonschema
import pytest

from pykubeproxy.config import ACTIONS, SETTINGS
from pykubeproxy.report.document import Report
from tests.docs import json_examples, json_reference, reference
from tests.docs.pages import DOCS


def test_each_part_has_one_place() -> None:
    pages = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    assert sorted(re.findall(r"<!-- generated: (.+?) -->$", pages, re.MULTILINE)) == sorted(reference.PARTS)


def test_every_setting_is_documented() -> None:
    """Each field and each flag is on the page."""
    page = reference.settings()
    for setting in (*SETTINGS, *ACTIONS):
        assert not setting.field or f"`{setting.field}`" in page
        assert not setting.flag or f"`--{setting.flag}`" in page


@pytest.fixture(scope="module")
def examples() -> dict[str, tuple[str, str]]:
    return json_examples.examples()


@pytest.mark.parametrize("report", json_reference.REPORTS, ids=json_reference.kind_of)
def test_examples_match_their_schemas(report: type[Report], examples: dict[str, tuple[str, str]]) -> None:
    schema = json_reference.schema(report)
    jsonschema.Draft202012Validator.check_schema(schema)
    _, example = examples[json_reference.kind_of(report)]
    jsonschema.Draft202012Validator(schema).validate(json.loads(example))
