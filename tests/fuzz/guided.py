"""Run one target under atheris, which searches for inputs that reach new code.

`python -m tests.fuzz.guided TARGET FOLDER [OPTION...]`
"""

import sys
from pathlib import Path

import atheris  # the group "fuzz" of pyproject.toml

with atheris.instrument_imports(include=["pykubeproxy"]):
    from tests.fuzz.targets import TARGETS


def main(name: str, folder: str, *options: str) -> None:
    """Fuzz one target and exit with status 0 if it did not fail. The corpus in `folder` starts with the seeds."""
    target = TARGETS[name]
    corpus, words = Path(folder, "corpus"), Path(folder, "words")
    corpus.mkdir()
    for number, seed in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(seed)
    lines = ("".join(f"\\x{byte:02x}" for byte in token) for token in target.tokens or (b"0",))
    words.write_text("".join(f'"{line}"\n' for line in lines))
    fixed = [f"-dict={words}", "-verbosity=0", "-max_len=4096"]
    atheris.Setup([name, *options, *fixed, str(corpus)], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
