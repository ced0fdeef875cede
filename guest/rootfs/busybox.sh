#!/bin/bash
# Makes a small root filesystem, a folder with a static busybox and its
# commands, and a program that does nothing: guest/rootfs/busybox.sh OUT
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: busybox.sh OUT" >&2; exit 2; }

busybox=$(command -v busybox) ||
	{ echo "rootfs: busybox is missing: sudo apt-get install busybox-static" >&2; exit 1; }
# A guest has none of the host's libraries.
if LC_ALL=C readelf -l "$busybox" | grep -q INTERP; then
	echo "rootfs: $busybox is not static: sudo apt-get install busybox-static" >&2
	exit 1
fi

mkdir -p "$(dirname "$1")"
tmp=$(mktemp -d "$1.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
chmod 755 "$tmp"
mkdir -p "$tmp"/{bin,dev,etc,home/user,proc,root,run,sys,tmp,usr,var,workspace}
chmod 1777 "$tmp/tmp"
chmod 700 "$tmp/root"
ln -s bin "$tmp/sbin"
ln -s ../bin "$tmp/usr/bin"
ln -s ../bin "$tmp/usr/sbin"

cp "$busybox" "$tmp/bin/busybox"
chmod 755 "$tmp/bin/busybox"
for name in $("$busybox" --list); do
	[ "$name" = busybox ] || ln -s busybox "$tmp/bin/$name"
done

# The smallest program there is: what its execution costs is the cost of
# executing anything.
gcc -nostdlib -static -o "$tmp/bin/nothing" "$(dirname "${BASH_SOURCE[0]}")/nothing.S"
# For tests and measurements of forks.
for program in counter draw touch-pages; do
	gcc -std=gnu11 -O2 -Wall -Wextra -Werror -ffreestanding -fno-stack-protector -fno-pie -no-pie -nostdlib -static \
		-o "$tmp/bin/$program" "$(dirname "${BASH_SOURCE[0]}")/$program.c"
done

cat >"$tmp/etc/passwd" <<-'END'
	root:x:0:0:root:/root:/bin/sh
	user:x:1000:1000:user:/home/user:/bin/sh
	nobody:x:65534:65534:nobody:/nonexistent:/bin/false
END
cat >"$tmp/etc/group" <<-'END'
	root:x:0:
	user:x:1000:
	nogroup:x:65534:
END
echo 'hosts: files dns' >"$tmp/etc/nsswitch.conf"
echo '127.0.0.1 localhost' >"$tmp/etc/hosts"
# Needs root; without it /home/user belongs to the guest's root.
[ "$(id -u)" -ne 0 ] || chown 1000:1000 "$tmp/home/user"

rm -rf "$1"
mv "$tmp" "$1"
trap - EXIT
