#!/usr/bin/env bash
# Install the wheel and the sdist of `make dist`, each into an empty virtual environment, first without and then with the
# extra `lab`, which includes `node`, run them there, and print the hashes of all files. The wheel installs without a compiler.
# Run the wheel with the lowest versions of its dependencies too.
set -eu
cd "$(dirname "$0")/../.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
program=$folder/venv/bin/pykubeproxy
for file in dist/*.whl dist/pykubeproxy-*[0-9].tar.gz; do
    python=$(tests/setup/python.sh)
    "$python" -m venv --clear "$folder/venv"
    install=("$folder/venv/bin/pip" install --quiet --disable-pip-version-check)
    if [[ $file == *.whl ]]; then
        "${install[@]}" --only-binary :all: "$file"
    else
        "${install[@]}" "$file"
    fi
    "$program" --version
    .venv/bin/python -m tests.base_commands "$program"
    # The step that the errors of other commands name.
    "${install[@]}" 'pykubeproxy[lab]'
    "$program" lab demo --list >/dev/null
done
# The lowest versions that pyproject.toml allows.
"$python" -m venv --clear "$folder/venv"
"$python" - >"$folder/lowest.txt" <<'EOF'
import re, tomllib
with open("pyproject.toml", "rb") as file:
    for text in tomllib.load(file)["project"]["dependencies"]:
        print(re.sub(r">=([^,]+).*", r"==\1", text))
EOF
"${install[@]}" -c "$folder/lowest.txt" dist/*.whl
.venv/bin/python -m tests.base_commands "$program"
# The plugin in one file, with an empty folder of its own, twice; under the name pykubeproxy it is that program.
case $(uname -sm) in
"Linux x86_64") plugin=$(echo dist/kubectl-*-linux-amd64) ;;
"Linux aarch64") plugin=$(echo dist/kubectl-*-linux-arm64) ;;
*) plugin= ;;
esac
if [ -n "$plugin" ]; then
    export XDG_CACHE_HOME=$folder/cache
    for _ in first again; do
        "$plugin" --version
    done
    [ "$(stat -c %a "$folder/cache/pykubeproxy")" = 700 ]
    ln -s "$PWD/$plugin" "$folder/pykubeproxy"
    .venv/bin/python -m tests.base_commands "$folder/pykubeproxy"
fi
sha256sum dist/*
