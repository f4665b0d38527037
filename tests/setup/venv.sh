#!/usr/bin/env bash
# Create a virtual environment with this checkout and locked packages: venv.sh FOLDER FILE… The first file has the packages
# that build others.
set -eu
cd "$(dirname "$0")/../.."
venv=$1
shift
install=("$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar=off --no-deps)
python=$(tests/setup/python.sh)
"$python" -m venv --clear "$venv"
"${install[@]}" --require-hashes --requirement "$1"
shift
"${install[@]}" --require-hashes --no-build-isolation --use-pep517 "${@/#/--requirement=}"
"${install[@]}" --no-build-isolation --editable .
"$venv/bin/python" -m pip check
