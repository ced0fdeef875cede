#!/bin/bash
# Copies the shared libraries that programs need, and their loader, from this machine
# into a root filesystem: guest/rootfs/libraries.sh ROOT PROGRAM...
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: libraries.sh ROOT PROGRAM..." >&2; exit 2; }
root=$1
shift

# ldd fails for a file that is not linked dynamically, and goes on.
{ ldd "$@" 2>/dev/null || true; } |
	awk '$2 == "=>" && $3 ~ /^\// { print $3 } $1 ~ /^\// && NF == 2 && $1 !~ /:$/ { print $1 }' | sort -u |
	while read -r library; do
		mkdir -p "$root$(dirname "$library")"
		cp -L "$library" "$root$library"
	done
