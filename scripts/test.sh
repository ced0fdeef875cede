#!/bin/bash
# Runs all checks and tests: scripts/test.sh (or make test). AGENTRUN_SOAK=1
# asks the tests for full counts.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# Packages whose tests need /dev/kvm, of any kind, for at most the bare test
# guest. Tests that boot Linux are under test/microvm.
kvm_packages() { go list ./bench ./internal/kvm ./internal/vmm/... ./internal/vmmserver; }
linux_packages() { go list ./test/microvm/... 2>/dev/null || true; }
host_packages() {
	local packages
	packages=$(go list ./... | grep -v '^agentrun\.dev/test/microvm')
	own_kvm || packages=$(grep -vxF "$(kvm_packages)" <<<"$packages")
	# Where KVM is hardware nothing needs the testbed, and QEMU may be missing.
	[ "$(where)" != hardware ] || packages=$(grep -v '^agentrun\.dev/testbed' <<<"$packages")
	echo "$packages"
}

# Bare-guest and Linux-guest tests take their time in an emulated machine.
timeout=25m
[ -z "${AGENTRUN_SOAK:-}" ] || timeout=2h

gotest() { "$build/gotest" -allow scripts/skips.allow "$@"; }

static_checks() {
	local unformatted
	unformatted=$(gofmt -l $(go list -f "{{.Dir}}" ./...) | sort -u)
	[ -z "$unformatted" ] || die "not formatted (gofmt -w):
$unformatted"
	go vet ./...
	for script in scripts/*.sh guest/*/*.sh .ci/run; do bash -n "$script"; done
}

host_tests() {
	# -race needs cgo; -count=1 because a cached result has tested nothing.
	# shellcheck disable=SC2046 # one argument per package
	CGO_ENABLED=1 gotest -- -race -count=1 -timeout=$timeout $(host_packages)
}

# Two processors that really run at once need a testbed with two, which hangs
# now and then (see defaultCPUs in testbed/internal/machine): then it is a new
# machine's turn. A failure in a machine that answers is a failure.
parallel_test() {
	local try timeout=3m
	for try in 1 2 3; do
		"$build/testbed" stop
		"$build/testbed" start --cpus 2
		if microvm_tests -run='^TestParallel$' ./test/microvm; then
			"$build/testbed" stop
			return 0
		fi
		timeout -k 1 30 "$build/testbed" exec true && return 1
		echo "the emulated machine hangs (try $try)"
	done
	return 1
}

microvm_tests() {
	local packages=(-count=1 -timeout=$timeout "$@")
	if [ "$(where)" = hardware ]; then
		CGO_ENABLED=0 gotest -v -- "${packages[@]}"
	else
		# One package at a time: the emulated machine is slow enough.
		CGO_ENABLED=0 gotest -v -- -p 1 -exec "$build/testbed exec" "${packages[@]}"
	fi
}

scripts/packages.sh
phase "programs" build_programs
go build -o "$build/gotest" ./scripts/gotest
phase "test guest" build_test_guest
phase "static checks" static_checks
phase "lint" scripts/lint.sh --if-possible
phase "guest kernel" build_kernel
if own_kvm; then
	phase "tests on the host, with its own /dev/kvm for the bare guest" host_tests
else
	phase "tests on the host (no /dev/kvm: the bare guest runs in the testbed alone)" host_tests
fi
if [ "$(where)" = hardware ]; then
	# shellcheck disable=SC2046
	phase "tests with Linux guests, on this host's KVM" microvm_tests $(linux_packages)
else
	phase "testbed" "$build/testbed" start
	# shellcheck disable=SC2046
	phase "tests with the bare guest, in the testbed" microvm_tests $(kvm_packages)
	# shellcheck disable=SC2046
	phase "tests with Linux guests, in the testbed" microvm_tests -skip='^TestParallel$' $(linux_packages)
	phase "two processors at once, in the testbed" parallel_test
fi
printf '\nall passed in %s\n' "$(seconds_since "$script_begin")"
