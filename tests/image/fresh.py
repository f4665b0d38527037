"""Run make targets in a fresh clone on a bare Debian: `python -m tests.image.fresh [TARGET]...`; default: run, test.

The container has Debian's minimal packages, make and git. Uncommitted changes are not in the clone. Needs root, podman,
debootstrap, a Debian mirror and a Python package index.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.image.base import PROJECT, Podman, base_image, require_tools

_SCRIPT = """
apt-get update -qq
apt-get install -y -qq --no-install-recommends make git >/dev/null
git config --global --add safe.directory '*'
git clone --quiet /mnt/project /project
exec make --directory=/project "$@"
"""


def main() -> None:
    """Build the container's image, clone and run make."""
    require_tools("podman", "debootstrap")
    with tempfile.TemporaryDirectory(prefix="fresh-") as folder, Podman(Path(folder, "podman")) as podman:
        image = base_image(podman, Path(folder))
        clone = f"{folder}/project.git"
        subprocess.run(["git", "clone", "--quiet", "--bare", PROJECT, clone], check=True)
        options = ("--privileged", "--network=host", "--env=CI=true", f"--volume={clone}:/mnt/project:ro")
        targets = sys.argv[1:] or ["run", "test"]
        print(podman.run(image, "/bin/sh", "-ec", _SCRIPT, "make", *targets, options=options))


if __name__ == "__main__":
    main()
