#!/bin/bash
# Starts the emulated machine, after building what it is made of:
# scripts/testbed.sh (or make testbed).
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

scripts/packages.sh
go_build -o "$build/" ./testbed
build_testbed
"$build/testbed" start
