#!/bin/bash
# Builds everything into build/: scripts/build.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

scripts/packages.sh
phase "programs" build_programs
phase "gVisor" build_gvisor_helper
phase "test guest" build_test_guest
phase "guest kernel" build_kernel
[ "$(where)" = hardware ] || phase "QEMU and a kernel for the testbed" build_testbed
ls -l "$build" | awk 'NF > 8 && /^-/ { printf "  %-16s %7.1f MiB\n", $9, $5 / 1048576 }'
