# Sourced by the other scripts: the repository's folder, phases, the host's KVM.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$repo/build
cd "$repo"
export AGENTRUN_ASSETS=${AGENTRUN_ASSETS:-$build}
cache=${AGENTRUN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/agentrun}

die() {
	printf '%s: %s\n' "$(basename "$0")" "$*" >&2
	exit 1
}

command -v go >/dev/null ||
	die "Go is missing: install Go 1.26, or any from 1.21 on, which fetches 1.26 itself (https://go.dev/doc/install)"

# What is compiled names no folder of this machine: all checkouts share it, and so do
# programs, tests and linters.
export GOFLAGS="${GOFLAGS:+$GOFLAGS }-trimpath"

script_begin=$(date +%s%N)

# seconds_since NANOSECONDS: for people.
seconds_since() {
	local ms=$((($(date +%s%N) - $1) / 1000000))
	printf '%d.%d s' $((ms / 1000)) $((ms % 1000 / 100))
}

# phase NAME COMMAND…: runs a step under a heading, and says how long it took.
phase() {
	local name=$1 begin status=0
	shift
	printf '\n== %s\n' "$name"
	begin=$(date +%s%N)
	# A subshell with -e of its own: a function that is tested, as in
	# `"$@" || …`, would go on after a failing command.
	set +e
	(
		set -e
		"$@"
	)
	status=$?
	set -e
	if [ $status -ne 0 ]; then
		printf '== %s: FAILED after %s\n' "$name" "$(seconds_since "$begin")"
		return $status
	fi
	printf '== %s: %s\n' "$name" "$(seconds_since "$begin")"
}

# Programs are static.
go_build() {
	local version
	version=$(git describe --tags --always --dirty 2>/dev/null || echo dev)
	CGO_ENABLED=0 go build -ldflags="-s -w -X main.version=$version" "$@"
}

# Tests update AgentRun with real builds (test/forkd): "stamped" is the same source with
# another build id, "older" lacks what the newest version of each control protocol has added.
update_flags() {
	case $1 in
	stamped) echo "-ldflags=-s -w -buildid=stamped" ;;
	older) echo "-ldflags=-s -w"$'\n'"-tags=without_newest" ;;
	esac
}

build_programs() {
	mkdir -p "$build"
	go_build -o "$build/" ./cmd/agentrun ./cmd/bench ./cmd/netd ./testbed ./internal/host/jail/escapee
	# These exist once per sandbox, are idle and hardly ever collect garbage. The
	# collector that Go has since 1.26 keeps its marks in the spans, a page more of
	# each: 90 KiB of a vmm process.
	GOEXPERIMENT=nogreenteagc go_build -o "$build/" ./cmd/vmm
	local other flags
	for other in stamped older; do
		mapfile -t flags < <(update_flags $other)
		GOEXPERIMENT=nogreenteagc CGO_ENABLED=0 go build "${flags[@]}" -o "$build/updates/$other/" ./cmd/vmm
	done
	# A heap that begins where an arena does needs one page table less.
	GOEXPERIMENT=nogreenteagc,norandomizedheapbase64 go_build -o "$build/" ./cmd/guest-agent
}

# gVisor is large and rarely changes: its helper is kept in the cache under the
# hash of all that it is built from. A module of its own, see docs/design/gvisor.md.
# What is built is a copy of gVisor's module with our patches (gvisor/patches).
build_gvisor_helper() {
	local hash helper other flags
	hash=$({
		go version
		cat gvisor/go.mod gvisor/go.sum go.mod
		find gvisor internal/guest/guestmux internal/engine/gvisorctl internal/vmm/livefork internal/vmm/vmmctl internal/storage/extent internal/storage/layer internal/codec \
			-name '*.go' ! -name '*_test.go' -o -name '*.s' -o -name '*.json' -o -name '*.patch' | LC_ALL=C sort | xargs sha256sum
	} | sha256sum | cut -c1-16)
	helper=$cache/gvisor/gvisor-helper-$hash
	if [ ! -x "$helper" ] || [ ! -x "$helper-stamped" ] || [ ! -x "$helper-older" ]; then
		echo "building gVisor (a few minutes, once)" >&2
		mkdir -p "$cache/gvisor"
		# The snapshots of one build are not another's: no version, nothing that
		# differs from one checkout to the next.
		patch_gvisor
		link_gvisor_helper "$helper" -ldflags="-s -w"
		for other in stamped older; do
			mapfile -t flags < <(update_flags $other)
			link_gvisor_helper "$helper-$other" "${flags[@]}"
		done
		rm -rf "$patched"
	fi
	from_cache "$helper" gvisor-helper
	for other in stamped older; do
		from_cache "$helper-$other" "updates/$other/gvisor-helper"
	done
}

# link_gvisor_helper FILE FLAG…: all but the first take little more than the linker's time.
link_gvisor_helper() {
	local to=$1
	shift
	(cd gvisor && CGO_ENABLED=0 go build -modfile="$patched/patched.mod" "$@" -o "$to.tmp" ./cmd/gvisor-helper)
	mv "$to.tmp" "$to"
}

# patched is where gVisor's source is built: the same path in every checkout, seen
# from gvisor/, as the helper has it in it.
patched=$build/gvisor-source

# patch_gvisor makes that, and patched.mod, which has the helper built with it.
patch_gvisor() {
	local module=gvisor.dev/gvisor from p
	command -v patch >/dev/null || die "patch is missing: install it (apt-get install patch)"
	from=$(cd gvisor && go mod download $module && go list -m -f '{{.Dir}}' $module)
	rm -rf "$patched"
	mkdir -p "$build"
	cp -r "$from" "$patched"
	chmod -R u+w "$patched"
	for p in gvisor/patches/*.patch; do
		patch -d "$patched" -p1 --fuzz=0 --forward --quiet <"$p" || die "$p does not fit $from"
	done
	cp gvisor/go.mod "$patched/patched.mod"
	cp gvisor/go.sum "$patched/patched.sum"
	(cd gvisor && go mod edit -replace $module=../build/gvisor-source "$patched/patched.mod")
}

build_test_guest() { guest/testguest/build.sh "$build/testguest.elf"; }

# from_cache FILE NAME: a copy in build/, so that nobody writes to the cache.
from_cache() {
	mkdir -p "$(dirname "$build/$2")"
	cmp -s "$1" "$build/$2" && return
	cp "$1" "$build/$2.tmp"
	mv "$build/$2.tmp" "$build/$2"
}

build_kernel() {
	local kernel
	kernel=$(guest/kernel/build.sh | tail -n1)
	from_cache "$kernel" vmlinux
}

build_testbed_qemu() {
	local qemu
	qemu=$(testbed/qemu/build.sh | tail -n1)
	from_cache "$qemu" qemu-system-x86_64
}

# build_testbed makes what the emulated machine consists of.
build_testbed() {
	build_testbed_qemu
	fetch_testbed_kernel
}

# The machine runs the host's kernel where a newer one cannot be had.
fetch_testbed_kernel() {
	local kernel
	if kernel=$(testbed/kernel/fetch.sh | tail -n1); then
		mkdir -p "$build"
		ln -sfn "$kernel" "$build/testbed-kernel"
	else
		rm -f "$build/testbed-kernel"
	fi
}

# where prints "hardware" or "testbed": which KVM microVMs are to run on.
where() { "$build/testbed" check 2>/dev/null; }

# inside COMMAND…: runs a program on the KVM that where names.
inside() {
	if [ "$(where)" = hardware ]; then "$@"; else "$build/testbed" exec -- "$@"; fi
}

# own_kvm says whether this host has a /dev/kvm of any kind that we may use.
own_kvm() { [ -r /dev/kvm ] && [ -w /dev/kvm ]; }
