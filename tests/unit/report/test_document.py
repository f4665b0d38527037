"""Documents follow from the types of reports."""

from collections.abc import Iterable

import msgspec
import yaml

from pykubeproxy.objects import Family
from pykubeproxy.report.document import Report, document, json_text, yaml_text
from pykubeproxy.report.text import Block


class SampleReport(Report, frozen=True):
    node_name: str
    families: dict[Family, int]
    since: float | None = None

    def blocks(self, *, wide: bool) -> Iterable[Block]:
        return ()

    def names(self) -> Iterable[str]:
        return (f"node/{self.node_name}",)


SAMPLE = SampleReport(node_name="node1\x1b[2J", families={Family.IPV4: 1})
EXPECTED = {
    "apiVersion": "pykubeproxy/v1",
    "kind": "Sample",
    "nodeName": "node1\x1b[2J",
    "families": {"IPv4": 1},
    "since": None,
}


def test_a_report_is_a_document_with_version_and_kind_first() -> None:
    found = document(SAMPLE)
    assert found == EXPECTED
    assert list(found)[:2] == ["apiVersion", "kind"]


def test_json_and_yaml_hold_the_same_in_printable_characters() -> None:
    found = document(SAMPLE)
    assert msgspec.json.decode(json_text(found)) == EXPECTED
    assert yaml.safe_load(yaml_text(found)) == EXPECTED
    for text in (json_text(found), yaml_text(found)):
        assert all(line.isprintable() for line in text.splitlines())


def test_bytes_that_are_no_text_are_kept_as_escapes() -> None:
    assert "udcff" in json_text({"name": "\udcff"})
