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

# Usage: lock NAME ARGUMENT…; the arguments request the packages of a file.
lock() {
    "${compile[@]}" --constraints "$all" --output-file "$temporary/part.txt" "${@:2}"
    # The lines of the whole resolution: its markers hold for all files.
    awk -F == -v file="$folder/$1.txt" '
        FNR == 1 { part++ }
        /^ / && !shown { next }
        !/^ / { shown = part == 3 && ($1 in requested) && !($1 in locked) }
        !/^ / && part == 1 { locked[$1] }
        !/^ / && part == 2 { requested[$1] }
        shown { print >file }
    ' "$temporary/locked.txt" "$temporary/part.txt" "$all"
    cat "$folder/$1.txt" >>"$temporary/locked.txt"
}
echo >"$temporary/locked.txt"
lock node --extra node pyproject.toml
lock lab --extra lab pyproject.toml
for group in "${groups[@]}"; do
    lock "$group" --group "$group"
done
