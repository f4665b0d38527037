"""MkDocs hooks: insert what the code generates into pages, and add the generated files to the site."""

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from tests.docs.reference import FILES, PARTS

# The rest of a marker's line tells readers of the source where the part is. It comes first: a line that begins with a
# comment is HTML as a whole.
_MARKER = re.compile(r"^.*<!-- generated: (.+?) -->$", re.MULTILINE)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated files."""
    for name, make in FILES.items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page with the generated parts in place of their markers."""
    return _MARKER.sub(lambda marker: PARTS[marker[1]](), markdown)
