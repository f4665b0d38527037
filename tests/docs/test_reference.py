"""The reference pages and the generated picture match the code."""

import pytest

from pykubeproxy.config import ACTIONS, SETTINGS
from tests.docs import reference
from tests.docs.pages import DOCS


@pytest.mark.parametrize("name", reference.PAGES)
def test_pages_are_current(name: str) -> None:
    """Each page is what `make docs` writes, except for line breaks, which differ between releases of click."""
    kept = (DOCS / name).read_text()
    assert kept.split() == reference.PAGES[name]().split(), f"{name} is not current: run `make docs`"


def test_every_setting_is_documented() -> None:
    """Each field and each flag is on the page."""
    page = reference.configuration()
    for setting in (*SETTINGS, *ACTIONS):
        assert not setting.field or f"`{setting.field}`" in page
        assert not setting.flag or f"`--{setting.flag}`" in page
