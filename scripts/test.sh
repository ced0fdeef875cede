#!/bin/bash
# Runs all checks and tests: scripts/test.sh (or make test). AGENTRUN_SOAK=1
# asks the tests for full counts.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# Packages whose tests need /dev/kvm, of any kind, for at most the bare test
# guest. Tests that boot Linux are under test/microvm.
kvm_packages() { go list ./bench ./internal/engine/microvm ./internal/vmm ./internal/vmm/acpi ./internal/vmm/cpu ./internal/vmm/kvm ./internal/vmm/vmmserver; }
# Their tests also run in the testbed: it has cgroups v2, where hosts may have v1.
cgroup_packages() { go list ./internal/host/jail; }
# These too: kernels differ in what memory they can protect.
memory_packages() { go list ./internal/vmm/guestmem; }
linux_packages() { go list ./test/microvm/... 2>/dev/null || true; }
# Those that take longest begin first: nobody is to wait for them in the end.
longest=(./test/gvisor ./test/forkd ./internal/network/stack ./internal/network/netd ./test/network ./internal/storage/image)
host_packages() {
	local packages
	packages=$(
		go list "${longest[@]}"
		go list ./... | grep -v '^agentrun\.dev/test/microvm' | grep -vxF "$(go list "${longest[@]}")"
	)
	own_kvm || packages=$(grep -vxF "$(kvm_packages)" <<<"$packages")
	# Where KVM is hardware nothing needs the testbed, and QEMU may be missing.
	[ "$(where)" != hardware ] || packages=$(grep -v '^agentrun\.dev/testbed' <<<"$packages")
	echo "$packages"
}

# Bare-guest and Linux-guest tests take their time in an emulated machine.
timeout=25m
[ -z "${AGENTRUN_SOAK:-}" ] || timeout=2h

# -count=1 because a cached result has tested nothing; -vet=off because static_checks has
# vetted.
test_flags=(-count=1 -vet=off -timeout=$timeout)

gotest() { "$build/gotest" -allow scripts/skips.allow "$@"; }

# Without cgo, as the programs: what is compiled for them serves here, too.
static_checks() {
	export CGO_ENABLED=0
	local unformatted
	unformatted=$(gofmt -l $(go list -f "{{.Dir}}" ./...) gvisor | sort -u)
	[ -z "$unformatted" ] || die "not formatted (gofmt -w):
$unformatted"
	go vet ./...
	(cd gvisor && go vet ./...)
	for script in scripts/*.sh guest/*/*.sh testbed/*/*.sh .ci/run; do bash -n "$script"; done
	go run ./scripts/words -max 5 >/dev/null # it says where there are more
}

host_tests() {
	# -race needs cgo. One package more at once than there are processors: tests of
	# sandboxes wait now and then.
	# shellcheck disable=SC2046 # one argument per package
	CGO_ENABLED=1 gotest -slow 10s -- -race -p $(($(nproc) + 1)) "${test_flags[@]}" $(host_packages)
}

# The helper's own tests; gVisor with -race would be built anew.
gvisor_tests() { (cd gvisor && CGO_ENABLED=0 "$build/gotest" -allow ../scripts/skips.allow -- "${test_flags[@]}" ./...); }

# on_the_host runs what needs no testbed, named NAME. The SDK's tests wait for one
# sandbox at a time, so they run beside the others, and are printed after them.
on_the_host() {
	local name=$1 log=$build/beside-host.log beside status
	(
		phase "tests of gVisor's helper" gvisor_tests
		phase "the Python SDK, with a daemon on gVisor" scripts/sdk-python.sh
	) >"$log" 2>&1 &
	beside=$!
	set +e
	(phase "$name" host_tests)
	status=$?
	set -e
	wait "$beside" || status=$?
	cat "$log"
	return "$status"
}

hardware_tests() { CGO_ENABLED=0 gotest -v -- "${test_flags[@]}" "$@"; }

# One package at a time: the emulated machine is slow enough.
in_testbed() {
	"$build/testbed" start
	CGO_ENABLED=0 gotest -v -slow 10s -- "${test_flags[@]}" -p 1 -exec "$build/testbed exec" "$@"
}

# root_archives makes what the images of ./test/network consist of: an emulated machine
# would take minutes for it.
root_archives() {
	export AGENTRUN_TEST_ROOTS=$build/test-roots
	local script root=$AGENTRUN_TEST_ROOTS/root
	mkdir -p "$AGENTRUN_TEST_ROOTS"
	for script in busybox.sh python.sh programs.sh; do
		rm -rf "$root"
		guest/rootfs/$script "$root"
		tar -C "$root" -cf "$AGENTRUN_TEST_ROOTS/$script.tar" .
	done
	rm -rf "$root"
}

# A machine emulates one processor, and a host has at least two: the second machine
# has about half of the work, and is printed after the first. Of ./test/microvm it has
# these.
second_half='^(TestConformance|TestCompaction)$'

in_second_testbed() {
	local status=0
	export AGENTRUN_TESTBED_MACHINE=second
	"$build/testbed" start --kernel / # the other one's is newer
	# shellcheck disable=SC2046 # one argument per package
	in_testbed $(kvm_packages) $(cgroup_packages) $(memory_packages) $(linux_packages | grep -v '/test/microvm$' | grep -v '/script$' | grep -v '/survival$') || status=$?
	# Its soak has fifty sandboxes and more at once.
	[ -z "${AGENTRUN_SOAK:-}" ] || "$build/testbed" exec scripts/testbed-scheduler.sh busy
	in_testbed ./test/microvm/survival || status=$?
	[ -z "${AGENTRUN_SOAK:-}" ] || "$build/testbed" exec scripts/testbed-scheduler.sh normal
	in_testbed -run="$second_half" ./test/microvm || status=$?
	# The manuals of the daemon and of packs, and its updates, which on this host run on
	# gVisor: a part of them, as an emulated machine takes minutes for each.
	local manuals='^TestScripts$/^pool$' packages=./test/forkd
	[ -z "${AGENTRUN_SOAK:-}" ] || manuals='^(TestScripts|TestUpdate)$' packages='./test/forkd ./test/pack'
	# shellcheck disable=SC2086 # one argument per package
	in_testbed -run="$manuals" $packages || status=$?
	# Connected sandboxes: the shortest of these tests, or all of them, with as many
	# forks and kills as an emulated machine serves in time.
	root_archives
	if [ -z "${AGENTRUN_SOAK:-}" ]; then
		in_testbed -run='^TestPolicy$' ./test/network || status=$?
	else
		AGENTRUN_SOAK=10 in_testbed ./test/network || status=$?
	fi
	return "$status"
}

in_two_testbeds() {
	local log=$build/second-machine.log second status=0
	in_second_testbed >"$log" 2>&1 &
	second=$!
	# shellcheck disable=SC2046 # one argument per package
	in_testbed -skip="^TestParallel$|$second_half" ./test/microvm $(linux_packages | grep '/script$') || status=$?
	wait "$second" || status=$?
	cat "$log"
	AGENTRUN_TESTBED_MACHINE=second "$build/testbed" stop
	return "$status"
}

# Two processors at once need a machine with two. Its emulation still breaks
# about one guest in eighty (testbed/README.md), so this one test gets three
# tries, each in a new machine.
parallel_in_testbed() {
	local try
	for try in 1 2 3; do
		"$build/testbed" stop
		"$build/testbed" start --cpus 2
		in_testbed -run='^TestParallel$' ./test/microvm && return
		echo "== try $try of 3 failed"
	done
	return 1
}

scripts/packages.sh
phase "programs" build_programs
phase "gVisor" build_gvisor_helper
go build -o "$build/gotest" ./scripts/gotest
phase "test guest" build_test_guest
phase "static checks" static_checks
phase "lint" scripts/lint.sh --if-possible
phase "guest kernel" build_kernel
[ "$(where)" = hardware ] || phase "QEMU and a kernel for the testbed" build_testbed
if own_kvm; then
	on_the_host "tests on the host, with its own /dev/kvm for the bare guest"
else
	on_the_host "tests on the host (no /dev/kvm: the bare guest runs in the testbed alone)"
fi
# shellcheck disable=SC2046 # one argument per package
if [ "$(where)" = hardware ]; then
	phase "tests with Linux guests, on this host's KVM" hardware_tests $(linux_packages)
else
	phase "tests with the bare guest and with Linux guests, in two testbeds" in_two_testbeds
	phase "two processors at once, in the testbed" parallel_in_testbed
	"$build/testbed" stop
fi
printf '\nall passed in %s\n' "$(seconds_since "$script_begin")"
