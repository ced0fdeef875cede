#!/bin/bash
# Runs the benchmarks that match BENCH: on the host, then those with microVMs
# on hardware KVM or in the testbed. Numbers of the testbed are to be read as
# ratios to the floor printed beside them.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

flags=(-run='^$' -bench="${BENCH:-.}" -benchmem -benchtime="${BENCHTIME:-1s}" -timeout=2h)

host_benchmarks() {
	# shellcheck disable=SC2046 # one argument per package
	go test "${flags[@]}" $(go list ./... | grep -v '^agentrun\.dev/test/microvm') | grep -vE 'no test files|^(ok|PASS|goos|goarch|cpu)'
}

microvm_benchmarks() {
	local packages
	packages=$(go list ./test/microvm/... ./internal/vmm/...)
	local exec=()
	[ "$(where)" = hardware ] || exec=(-exec "$build/testbed exec")
	# shellcheck disable=SC2086
	CGO_ENABLED=0 go test -p 1 "${exec[@]}" "${flags[@]}" $packages
}

scripts/packages.sh
phase "programs" build_programs
phase "test guest" build_test_guest
phase "guest kernel" build_kernel
phase "on the host" host_benchmarks
phase "with microVMs ($(where))" microvm_benchmarks
