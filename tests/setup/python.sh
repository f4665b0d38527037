#!/usr/bin/env bash
# Print the path of a Python 3.11 or later.
set -eu
for name in python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3; do
    path=$(command -v "$name") || continue
    if "$path" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "$path"
        exit 0
    fi
done
echo "no Python 3.11 or later found; install python3 of Debian 12, Ubuntu 24.04 or later" >&2
exit 1
