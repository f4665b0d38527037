#!/usr/bin/env bash
# Run a command as root with processes, mounts and named network namespaces of its own. When the command ends, or what started
# this script, all of them end: nothing stays behind.
set -eu
if [ "$1" != --started ]; then
    exec setpriv --pdeathsig TERM "$0" --started "$@"
fi
shift

child=
# shellcheck disable=SC2317 # traps call it
end() {
    exec 2>/dev/null
    [ -z "$child" ] || kill -KILL "$child" || true
    wait
    exit 143
}
trap end TERM HUP
# The first Ctrl-C is for the command, which prints its results; the second one kills it.
trap 'trap end INT' INT

# bash is the first process: the kernel kills the others when it ends. It waits for orphans.
# shellcheck disable=SC2016 # the inner shell expands these
setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child --mount-proc bash -c '
    for folder in /run/netns /run/pykubeproxy /run/pykubeproxy-lab; do
        mkdir -p "$folder"
        mount -t tmpfs -o mode=755 tmpfs "$folder"
    done
    "$@"
    exit $?' bash "$@" &
child=$!
while :; do
    status=0
    wait "$child" || status=$?
    kill -0 "$child" 2>/dev/null || exit $status
done
