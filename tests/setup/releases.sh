#!/usr/bin/env bash
# Run all tests with the newest or the lowest releases that pyproject.toml allows: releases.sh newest|lowest. If they fail, name
# the releases that differ from the locked ones. Old releases have too few types for lint.
set -eu
cd "$(dirname "$0")/../.."
case ${1:-} in
newest) targets=(lint pytest) options=() ;;
lowest) targets=(pytest) options=(--resolution=lowest-direct) ;;
*) echo "set RELEASES=newest or RELEASES=lowest" >&2 && exit 2 ;;
esac
folder=build/$1

# Usage: versions FOLDER
versions() {
    sed -n 's/^\([a-z0-9._-]*==[^ ]*\).*/\1/p' "$1"/*.txt | sort
}
differences() {
    diff <(versions requirements) <(versions "$folder/requirements") | sed -n "s/^</locked/p; s/^>/$1/p" | sort -k 2
}

tests/setup/lock.sh "$folder/requirements" "${options[@]}"
echo "Testing with these releases:"
differences "$1"
failed=()
for target in "${targets[@]}"; do
    make "$target" VENV="$folder/venv" LOCK="$folder/requirements" || failed+=("$target")
done
[ ${#failed[@]} = 0 ] && exit
{
    echo "make ${failed[*]} failed with these releases:"
    differences "$1"
} >&2
exit 1
