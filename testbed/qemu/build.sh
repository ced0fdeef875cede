#!/bin/bash
# Builds the testbed's QEMU from Debian's source: x86-64 on TCG, the few devices
# that the machine has, and patches for what QEMU's emulated SVM does wrong.
#
#   testbed/qemu/build.sh            build once, print the path of the program
#   testbed/qemu/build.sh --path     print where it is or would be; build nothing
#
# Progress goes to stderr. The result is kept under $AGENTRUN_CACHE (default:
# $XDG_CACHE_HOME/agentrun or ~/.cache/agentrun) by the hash of what decides it.
set -euo pipefail
export LC_ALL=C

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${AGENTRUN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/agentrun}/qemu

# The release whose QEMU has what we need: 10.0 locks a page before it translates
# its code, without which code that another processor patches stays as it was.
suite=trixie
# QEMU 10 wants a newer one than Debian 12 has; from PyPI into a folder of its own.
meson=meson==1.5.2

say() { printf 'qemu: %s\n' "$*" >&2; }
die() { printf 'qemu: %s\n' "$*" >&2; exit 1; }

# The source's version is not part of the key: Debian replaces it with each point
# release, and looking it up needs the network.
key=$({
	gcc --version | head -n1
	cat "$here"/*.patch "$here/devices.mak" "${BASH_SOURCE[0]}"
} | sha256sum | cut -c1-32)
program=$cache/$key/qemu-system-x86_64

if [ "${1:-}" = --path ]; then
	printf '%s\n' "$program"
	exit 0
fi
[ $# -eq 0 ] || die "unknown argument $1 (only --path is known)"

mkdir -p "$cache"
exec 9>"$cache/lock"
if ! flock -n 9; then
	say "another build is running; waiting for it"
	flock 9
fi
if [ -x "$program" ]; then
	printf '%s\n' "$program"
	exit 0
fi

for tool in gcc ninja pkg-config dpkg-source python3 patch; do
	command -v "$tool" >/dev/null || die "$tool is missing: run scripts/packages.sh"
done

# Leftovers are of builds which were killed: the lock says that none is running.
rm -rf "$cache"/build.*
work=$(mktemp -d "$cache/build.XXXXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
log=$cache/build.log
: >"$log"
begin=$SECONDS

# run WHAT COMMAND…: into the log, whose end is shown when it fails.
run() {
	local what=$1
	shift
	"$@" >>"$log" 2>&1 || { tail -n 20 "$log" >&2; die "$what failed (log: $log)"; }
}

# A list of our own, so that this machine's packages stay what they are.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | head -n1)
mkdir -p lists/partial
cat >sources.list <<-END
	deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror:-http://deb.debian.org/debian/} $suite main
END
apt() {
	apt-get -q -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=- \
		-o Dir::State::lists="$work/lists" -o APT::Sandbox::User= "$@"
}
say "fetching the source from Debian $suite"
run "apt-get update" apt update
run "apt-get source qemu" apt source --download-only qemu
run "unpacking" dpkg-source --no-check -x qemu_*.dsc source
for p in "$here"/*.patch; do
	run "$(basename "$p")" patch -d source -p1 --forward -i "$p"
done
cp "$here/devices.mak" source/configs/devices/x86_64-softmmu/testbed.mak

say "configuring $(cat source/VERSION)"
run "python3 -m venv" python3 -m venv venv
run "pip install $meson" venv/bin/pip install -q "$meson"
mkdir out
cd out
PATH=$work/venv/bin:$PATH run "configure" ../source/configure --python="$work/venv/bin/python3" \
	--target-list=x86_64-softmmu --without-default-features --without-default-devices \
	--with-devices-x86_64=testbed --enable-tcg --enable-fdt=system --enable-virtfs --enable-attr \
	--disable-docs --disable-install-blobs --disable-debug-info --disable-werror
say "compiling with $(nproc) jobs (a few minutes, once)"
run "ninja" ninja qemu-system-x86_64

strip -s qemu-system-x86_64
mkdir "$work/result"
mv qemu-system-x86_64 "$work/result/"
cp ../source/VERSION "$work/result/"
sync -f "$work/result"
rm -rf "${cache:?}/$key"
mv "$work/result" "$cache/$key"
say "built in $((SECONDS - begin)) s: $program"
printf '%s\n' "$program"
