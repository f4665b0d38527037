"""The documentation as a site: it builds without a warning, is whole, and asks for nothing from elsewhere."""

import html
import html.parser
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs.pages import DOCS, ROOT
from tests.docs.reference import FILES
from tests.fakes.browser import browse, needs_browser

# What a browser fetches by itself; links that readers follow are no matter.
FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}

# Names what is wider than its place, on pages in frames as wide as a window.
_MEASURE = """
onload = () => {
  const cut = [];
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument;
    for (const part of page.querySelectorAll("html, .md-content :is(pre, pre > code, .md-typeset__scrollwrap, img)"))
      if (part.scrollWidth > part.clientWidth || part.getBoundingClientRect().right > frame.clientWidth)
        cut.push(`${frame.src} ${frame.clientWidth} ${part.tagName} ${part.textContent.trim().slice(0, 40)}`);
  }
  document.title = JSON.stringify(cut);
};
"""


class Fetches(html.parser.HTMLParser):
    """Collects what a page makes a browser fetch."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(FETCHED.get(tag, ""))
        if address and not address.startswith("data:"):
            self.found.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; --strict makes a warning, such as a link or an anchor that leads nowhere, an error.

    With --quiet it would not: what is not told does not count.
    """
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # The theme tells of itself on stderr otherwise.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    """Each page in Markdown has become one of the site."""
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS).with_suffix(".html")).exists()


def test_generated_files_are_there(site: Path) -> None:
    assert [name for name in FILES if not (site / name).exists()] == []


def test_nothing_comes_from_elsewhere(site: Path) -> None:
    """Scripts, styles, fonts and pictures are files of the site, so that it works without a network."""
    pages = list(site.rglob("*.html"))
    assert pages
    for page in pages:
        for address in Fetches(page).found:
            parts = urlsplit(address)
            assert not parts.netloc, f"{page.name} fetches {address}"
            assert page.name == "404.html" or (page.parent / parts.path).exists(), (
                f"{page.name} lacks {address}"
            )
        assert 'class="mermaid"' not in page.read_text(), "it would be drawn by a script from elsewhere"


def test_no_font_or_style_comes_from_elsewhere(site: Path) -> None:
    """Nor do style sheets fetch anything."""
    for sheet in site.rglob("*.css"):
        text = sheet.read_text()
        assert "url(http" not in text
        assert "@import" not in text


def test_links_of_alerts_lead_to_runbooks(site: Path) -> None:
    """The page and the headings that alerts and panels link to are on the site."""
    monitoring = ROOT / "manifests/overlays/monitoring"
    (page,) = re.findall(
        r"url=https://docs\.example\.com/(\S+)", (monitoring / "kustomization.yaml").read_text()
    )
    ids = set(re.findall(r'id="([^"]+)"', (site / page).read_text()))
    links = "".join((monitoring / name).read_text() for name in ("alerts.yaml", "dashboard.json"))
    anchors = set(re.findall(r"runbooks(?:\b|:raw})#(\w+)", links, re.IGNORECASE))
    assert anchors and anchors <= ids


def test_it_can_be_searched(site: Path) -> None:
    """The index of the search holds every page."""
    found = {
        entry["location"].partition("#")[0]
        for entry in json.loads((site / "search" / "search_index.json").read_text())["docs"]
    }
    assert {str(page.relative_to(DOCS).with_suffix(".html")) for page in DOCS.rglob("*.md")} <= found


@needs_browser
def test_nothing_is_cut(site: Path, tmp_path: Path) -> None:
    """Tables, code and pictures fit into the window, on a phone too."""
    frames = "".join(
        f'<iframe src="{page.as_uri()}" style="border: 0; width: {width}px"></iframe>'
        for page in site.rglob("*.html")
        for width in (1280, 400)
    )
    (tmp_path / "all.html").write_text(f"{frames}<script>{_MEASURE}</script>")
    found = browse(tmp_path, (tmp_path / "all.html").as_uri(), "--allow-file-access-from-files", "--dump-dom")
    title = re.findall("<title>(.*)</title>", found)[0]
    assert json.loads(html.unescape(title)) == []
