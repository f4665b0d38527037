#!/bin/sh
# The first lines of the plugin in one file: the name of the file selects the program. The unpacked program is in a
# folder that only its owner can read or change.
case "${0##*/}" in
pykubeproxy | kubectl_complete-pykubeproxy) export PEX_SCRIPT="${0##*/}" ;;
esac
cache=~/.cache
cache="${XDG_CACHE_HOME:-$cache}"
export PEX_ROOT="${PEX_ROOT:-$cache/pykubeproxy}"
[ -d "$PEX_ROOT" ] || { mkdir -p "$cache" && mkdir -m 700 "$PEX_ROOT"; } 2>/dev/null || :
