"""`python -m pykubeproxy`."""

from pykubeproxy.cli import main

if __name__ == "__main__":
    main(prog_name="pykubeproxy")
