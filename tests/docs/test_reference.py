"""The reference pages are those of the code as it is."""

import pytest

from pykubeproxy.config import ACTIONS, SETTINGS
from tests.docs import reference
from tests.docs.pages import DOCS


@pytest.mark.parametrize("name", reference.PAGES)
def test_pages_are_current(name: str) -> None:
    """What `make docs` would write is there; how click breaks lines may differ from release to release."""
    kept = (DOCS / "reference" / name).read_text()
    assert kept.split() == reference.PAGES[name]().split(), f"{name} is not current: run `make docs`"


def test_every_setting_has_its_place() -> None:
    """Each field and each flag is on the page: in an entry, or among those to do, deprecated or without effect."""
    page = reference.configuration()
    for setting in (*SETTINGS, *ACTIONS):
        assert not setting.field or f"`{setting.field}`" in page
        assert not setting.flag or f"`--{setting.flag}`" in page
