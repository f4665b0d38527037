#!/usr/bin/env bash
# Run a command where the root is a mount point, as network namespaces with files of their own need it: that of a plain
# chroot is none.
set -eu
if grep -qE '^([^ ]+ ){4}/ ' /proc/self/mountinfo; then
    exec "$@"
fi
# shellcheck disable=SC2016 # the inner shell expands these
exec unshare --mount --propagation unchanged bash -c '
    mount --rbind / /mnt
    exec chroot /mnt env --chdir="$PWD" "$@"' bash "$@"
