#!/usr/bin/env bash
# Write the bill of materials of the wheel in dist/, with the pinned versions of its requirements.
set -eu
cd "$(dirname "$0")/../.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
wheel=$(echo dist/*.whl)
python3_path=$(tests/setup/python.sh)
"$python3_path" -m venv --without-pip "$folder"
install=(.venv/bin/python -m pip --python "$folder/bin/python" install --quiet --disable-pip-version-check)
"${install[@]}" --require-hashes -r requirements/node.txt
"${install[@]}" --no-deps "$wheel"
.venv/bin/python -m tests.sbom wheel "$wheel" "$folder"/lib/python3*/site-packages "${wheel%-py3-*}.cdx.json"
