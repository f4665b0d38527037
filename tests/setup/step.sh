#!/usr/bin/env bash
# Run a step of the set-up: step.sh TITLE COMMAND… Its output goes to build/setup.log. Print a line every few seconds, and the
# end of the log if the step fails.
set -eu
cd "$(dirname "$0")/../.."
log=build/setup.log
title=$1
shift
mkdir -p build
echo "$title; the log is $log"
echo "== $title" >>"$log"
# When this script ends, in whatever way, so does its standard input.
exec 3> >(
    while :; do
        read -rt 5 && continue
        [ $? -gt 128 ] || exit 0
        echo "  $SECONDS s: $(tail -n 1 "$log" | cut -c 1-100)"
    done
)
ticker=$!
status=0
"$@" >>"$log" 2>&1 3>&- || status=$?
exec 3>&-
wait $ticker
[ $status = 0 ] || { tail -n 20 "$log" && echo "$title failed with status $status; $log has all output"; } >&2
exit $status
