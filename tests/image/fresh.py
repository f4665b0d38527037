"""A fresh clone on a bare Debian: `python -m tests.image.fresh [TARGET]...` makes these there, else run and test.

What is committed is cloned into a Debian root file system that has nothing but make and git besides. Takes root,
debootstrap and the network; leaves nothing behind.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from tests.image.root import Root

_PROJECT = Path(__file__).parents[2]
_BASE = "debian:bookworm-slim"


def main() -> None:
    """Clone, and make."""
    work = Path(tempfile.mkdtemp(prefix="fresh-"))
    try:
        root = Root.of(_BASE, work / "root", "http://deb.debian.org/debian")
        root.run("apt-get update && apt-get install -y -q --no-install-recommends make git", quiet=True)
        root.run(
            "git config --global --add safe.directory '*' && git clone --quiet /run/project /project",
            shared={"/run/project": _PROJECT},
        )
        root.environment["CI"] = "true"
        for target in sys.argv[1:] or ("run", "test"):
            root.run(f"make --directory=/project {target}")
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
