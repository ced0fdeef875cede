#!/bin/bash
# Fetches the kernel that the testbed's machine runs, from a newer Debian than the
# host may be: KVM can map memory ahead of a guest since Linux 6.11.
#
#   testbed/kernel/fetch.sh            fetch once, print the folder with boot and lib
#   testbed/kernel/fetch.sh --path     print where it is or would be; fetch nothing
#
# Progress goes to stderr. The result is kept under $AGENTRUN_CACHE (default:
# $XDG_CACHE_HOME/agentrun or ~/.cache/agentrun) by the hash of this script.
# Nothing is installed.
set -euo pipefail
export LC_ALL=C

cache=${AGENTRUN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/agentrun}/testbed-kernel
suite=trixie

say() { printf 'testbed kernel: %s\n' "$*" >&2; }
die() { printf 'testbed kernel: %s\n' "$*" >&2; exit 1; }

# Debian replaces the version with each point release; looking it up needs the
# network, so it is not part of the key.
key=$(sha256sum <"${BASH_SOURCE[0]}" | cut -c1-32)
folder=$cache/$key

if [ "${1:-}" = --path ]; then
	printf '%s\n' "$folder"
	exit 0
fi
[ $# -eq 0 ] || die "unknown argument $1 (only --path is known)"

mkdir -p "$cache"
exec 9>"$cache/lock"
if ! flock -n 9; then
	say "another one is being fetched; waiting for it"
	flock 9
fi
if [ -d "$folder" ]; then
	printf '%s\n' "$folder"
	exit 0
fi

for tool in apt-get apt-cache dpkg-deb depmod; do
	command -v "$tool" >/dev/null || die "$tool is missing: run scripts/packages.sh"
done

# Leftovers are of runs which were killed: the lock says that none is under way.
rm -rf "$cache"/fetch.*
work=$(mktemp -d "$cache/fetch.XXXXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
log=$cache/fetch.log
: >"$log"

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
	deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror:-http://deb.debian.org/debian/} $suite main
END
options=(-q -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=-
	-o Dir::State::lists="$work/lists" -o Dir::State::status=/dev/null -o APT::Sandbox::User=)
say "fetching Debian $suite's"
run "apt-get update" apt-get "${options[@]}" update
package=$(apt-cache "${options[@]}" depends linux-image-amd64 | awk '$1 == "Depends:" { print $2; exit }')
[ -n "$package" ] || die "Debian $suite has no linux-image-amd64"
run "apt-get download $package" apt-get "${options[@]}" download "$package"
run "unpacking" dpkg-deb -x linux-image-*.deb result
# Where /usr is merged, packages say usr/lib.
[ -d result/lib ] || ln -s usr/lib result/lib
version=$(basename result/lib/modules/*)
run "depmod" depmod -b "$work/result" "$version"
rm -rf result/usr/share
sync -f result
mv result "$folder"
say "Linux $version"
printf '%s\n' "$folder"
