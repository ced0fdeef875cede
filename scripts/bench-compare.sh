#!/bin/bash
# Compares this checkout with another one by running their benchmarks alternately:
#   scripts/bench-compare.sh OTHER [ROUNDS]
# OTHER is a checkout of the code before, in which `make build` was run. Reports
# are left in build/out/compare. With hardware KVM all of it runs there; elsewhere
# the bare guest runs on the host and Linux guests in the testbed.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

other=$(cd "${1:?a checkout of the code before}" && pwd)
rounds=${2:-5}
out=$build/out/compare
[ -x "$build/bench" ] || die "$build/bench is missing: run make build"
[ -x "$other/build/agentrun" ] || die "$other/build/agentrun is missing: run make build there"

# report SIDE ROUND NAME FLAGS…: one benchmark of one side.
report() {
	local side=$1 round=$2 name=$3 checkout=$repo where=inside bench
	shift 3
	[ "$side" = after ] || checkout=$other
	bench=("$checkout/build/bench")
	# An older checkout has the benchmarks in the product.
	[ -x "${bench[0]}" ] || bench=("$checkout/build/agentrun" bench)
	case $* in *'--guest test'*) where=env ;; esac
	echo "$name, $side, round $round" >&2
	AGENTRUN_ASSETS=$checkout/build "$where" "${bench[@]}" "$@" --json >"$out/$name.$side.$round.json"
}

rootfs=$build/demo-rootfs
[ -d "$rootfs" ] || guest/rootfs/busybox.sh "$rootfs"
rm -rf "$out"
mkdir -p "$out"
for round in $(seq "$rounds"); do
	for side in before after; do
		report "$side" "$round" fork-bare fork --guest test -n 100
		report "$side" "$round" live-bare live --guest test -n 5
		report "$side" "$round" fork fork --rootfs "$rootfs" --program nothing -n 10 --shells 2
		report "$side" "$round" live live --rootfs "$rootfs" --memory 256M -n 3
		report "$side" "$round" claim claim --rootfs "$rootfs" --program nothing -n 30 --burst 1
	done
done
go run ./scripts/benchcompare "$out"
