#!/usr/bin/env bash
# Lock all requirements of pyproject.toml: lock.sh FOLDER [OPTION…]. One resolution gives a file for each extra and group,
# without the packages of the files before it: these can be installed in this order, without resolution.
# Options are those of `uv pip compile`, such as --resolution=lowest-direct. UV names the program.
set -eu
cd "$(dirname "$0")/../.."
folder=$1
shift
groups=(build kubectl check docs coverage dist fuzz helm lock)

compile=("${UV:-.venv/bin/uv}" pip compile --quiet --universal --python-version 3.11 --generate-hashes
    --no-annotate --no-header "$@")
rm -rf "$folder"
mkdir -p "$folder"
temporary=$(mktemp -d)
trap 'rm -r "$temporary"' EXIT
all=$temporary/all.txt
"${compile[@]}" --output-file "$all" --extra lab "${groups[@]/#/--group=}" pyproject.toml

# Usage: names FILE…
names() {
    sed -n 's/^\([a-z0-9._-]*\)==.*/\1/p' "$@" | sort -u
}
# Usage: lock NAME ARGUMENT…; the arguments request the packages of a file.
lock() {
    local file=$folder/$1.txt
    "${compile[@]}" --constraints "$all" --output-file "$temporary/requested.txt" "${@:2}"
    touch "$file"
    comm -23 <(names "$temporary/requested.txt") <(names "$folder"/*.txt) >"$temporary/new.txt"
    # The lines of the whole resolution: its markers hold for all files.
    awk -F == 'NR == FNR { new[$1]; next } !/^ / { shown = $1 in new } shown' "$temporary/new.txt" "$all" >"$file"
}
lock node --extra node pyproject.toml
lock lab --extra lab pyproject.toml
for group in "${groups[@]}"; do
    lock "$group" --group "$group"
done
