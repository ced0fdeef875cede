#!/bin/bash
# Builds the guest kernel (vmlinux) from Debian's kernel source, our patches and
# our config.
#
#   guest/kernel/build.sh            build once, print the path of vmlinux
#   guest/kernel/build.sh --path     print where it is or would be; build nothing
#
# Progress goes to stderr; the last line of stdout is the path. The result is
# kept under $AGENTRUN_CACHE (default: $XDG_CACHE_HOME/agentrun or
# ~/.cache/agentrun) by the hash of everything which decides it.
# AGENTRUN_KERNEL_SOURCE names another source tarball.
set -euo pipefail
export LC_ALL=C

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${AGENTRUN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/agentrun}/kernel
fragment=$here/config
patches=("$here"/patches/*.patch)

say() { printf 'kernel: %s\n' "$*" >&2; }
die() { printf 'kernel: %s\n' "$*" >&2; exit 1; }

mkdir -p "$cache"

# Debian drops old versions from its archive: take the newest it offers.
source=${AGENTRUN_KERNEL_SOURCE:-}
if [ -z "$source" ]; then
	source=$(find /usr/src -maxdepth 1 -name 'linux-source-*.tar.xz' | sort -V | tail -n1)
fi
[ -n "$source" ] && [ -f "$source" ] ||
	die "no kernel source (${source:-/usr/src/linux-source-*.tar.xz}): run scripts/packages.sh"

# Hashing 130 MB on every call would cost half a second: remember it by
# path, size and time.
stamp=$cache/source-$(stat -c '%n %s %Y' "$source" | sha256sum | cut -c1-16)
if [ ! -s "$stamp" ]; then
	sum=$(sha256sum <"$source" | cut -d' ' -f1)
	printf '%s\n' "$sum" >"$stamp.$$" && mv "$stamp.$$" "$stamp"
fi
read -r source_sum <"$stamp"

command -v gcc >/dev/null || die "gcc is missing: run scripts/packages.sh"
gcc_version=$(gcc --version | head -n1)

key=$({
	printf '%s\n%s\n' "$source_sum" "$gcc_version"
	cat "$fragment" "${patches[@]}" "${BASH_SOURCE[0]}"
} | sha256sum | cut -c1-32)
out=$cache/$key

if [ "${1:-}" = --path ]; then
	printf '%s\n' "$out/vmlinux"
	exit 0
fi
[ $# -eq 0 ] || die "unknown argument $1 (only --path is known)"

if [ -s "$out/vmlinux" ]; then
	printf '%s\n' "$out/vmlinux"
	exit 0
fi

exec 9>"$cache/lock"
if ! flock -n 9; then
	say "another build is running; waiting for it"
	flock 9
fi
if [ -s "$out/vmlinux" ]; then
	printf '%s\n' "$out/vmlinux"
	exit 0
fi

for tool in make flex bison bc xz patch; do
	command -v "$tool" >/dev/null || die "$tool is missing: run scripts/packages.sh"
done

# Inside the cache, so that the result moves in by rename. Leftovers are of
# builds which were killed: the lock says that none is running.
rm -rf "$cache"/build.*
work=$(mktemp -d "$cache/build.XXXXXXXX")
trap 'rm -rf "$work"' EXIT
log=$cache/build.log
: >"$log"

begin=$SECONDS
say "unpacking $(basename "$source")"
tar -xf "$source" -C "$work" --strip-components=1
cd "$work"

for p in "${patches[@]}"; do
	say "applying $(basename "$p")"
	# No fuzz: a hunk whose surroundings have changed must be looked at by somebody.
	patch -p1 --fuzz=0 --forward <"$p" >>"$log" 2>&1 ||
		{ tail -n 20 "$log" >&2; die "$(basename "$p") does not apply to $(basename "$source"): adapt it (log: $log)"; }
done

say "configuring"
grep '^CONFIG_' "$fragment" >fragment
make -s KCONFIG_ALLCONFIG=fragment allnoconfig >>"$log" 2>&1 &&
	make -s olddefconfig >>"$log" 2>&1 ||
	{ tail -n 20 "$log" >&2; die "make allnoconfig failed (log: $log)"; }

# Kconfig drops what its dependencies do not allow without a word.
lost=$(while IFS= read -r line; do
	name=${line%%=*}
	if [ "${line#*=}" = n ]; then
		! grep "^$name=" .config
	else
		grep -qxF "$line" .config || echo "$line"
	fi || true
done <fragment)
[ -z "$lost" ] || die "not as asked for in $fragment after olddefconfig:
$lost"

# Fixed, so that the same inputs give the same bytes.
export KBUILD_BUILD_TIMESTAMP='1970-01-01 00:00:00 UTC' KBUILD_BUILD_USER=agentrun KBUILD_BUILD_HOST=agentrun KBUILD_BUILD_VERSION=1

say "compiling with $(nproc) jobs (a few minutes, once)"
tty=0
[ ! -t 2 ] || tty=1
if ! make -j"$(nproc)" vmlinux 2>&1 | tee -a "$log" |
	awk -v tty=$tty -v begin="$(date +%s)" '
		/^  (CC|AS|LD|AR) / {
			n++
			if (tty ? n % 10 == 0 : n % 250 == 0) {
				s = sprintf("kernel: %d files, %d s", n, systime() - begin)
				printf tty ? "\r%s  %-50.50s" : "%s\n", s, $2 >"/dev/stderr"
			}
		}
		END { if (tty) printf "\r%80s\r", "" >"/dev/stderr" }'; then
	grep -nE 'error|Error|undefined' "$log" | tail -n 20 >&2
	die "the build failed (log: $log)"
fi

strip -s -o vmlinux.stripped vmlinux
mkdir result
mv vmlinux.stripped result/vmlinux
cp .config result/config
cp System.map result/System.map
sync -f result
rm -rf "$out"
mv result "$out"
say "built in $((SECONDS - begin)) s: $(du -h --apparent-size "$out/vmlinux" | cut -f1) $out/vmlinux"
printf '%s\n' "$out/vmlinux"
