#!/bin/bash
# Measures: the Go benchmarks that match BENCH on the host, then microVMs
# (build/bench) on hardware KVM or in the testbed. Times of the testbed mean
# something only beside the floor that is printed with them.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

host_benchmarks() {
	# shellcheck disable=SC2046 # one argument per package
	go test -run='^$' -bench="${BENCH:-.}" -benchmem -benchtime="${BENCHTIME:-1s}" -timeout=2h \
		$(go list ./... | grep -v '^agentrun\.dev/test/microvm') |
		awk '/^pkg:|^Benchmark|^---|^FAIL/'
}

microvm_benchmarks() {
	guest/rootfs/busybox.sh "$build/demo-rootfs"
	inside build/bench boot --rootfs build/demo-rootfs --program nothing
	inside build/bench boot --rootfs build/demo-rootfs --program true --boots 3
}

scripts/packages.sh
phase "programs" build_programs
phase "test guest" build_test_guest
phase "guest kernel" build_kernel
phase "on the host" host_benchmarks
phase "with microVMs ($(where))" microvm_benchmarks
