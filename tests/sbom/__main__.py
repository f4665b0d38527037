"""Write the bill of materials of a wheel or of an image. SOURCE_DATE_EPOCH is its date; the default is now."""

import argparse
from pathlib import Path

from tests import sbom


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.sbom", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    of_wheel = commands.add_parser("wheel", help="describe a wheel")
    of_wheel.add_argument("file", type=Path)
    of_wheel.add_argument("site", type=Path, help="the site-packages folder in which it is installed")
    of_image = commands.add_parser("image", help="describe an image")
    of_image.add_argument("root", type=Path, help="its root file system")
    for command in (of_wheel, of_image):
        command.add_argument("output", type=Path)
    arguments = parser.parse_args()
    text = (
        sbom.wheel(arguments.file, arguments.site)
        if arguments.command == "wheel"
        else sbom.image(arguments.root)
    )
    arguments.output.write_text(text)


if __name__ == "__main__":
    main()
