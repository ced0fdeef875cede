#!/bin/bash
# Inside a testbed machine: scripts/testbed-scheduler.sh busy|normal
#
# With a hundred microVMs at once an emulated machine spends most of its time on
# switching between them, each of which empties what QEMU has translated of the one
# before. busy lets a thread that runs go on for long: a fork, one of fifty at once, took
# 0.6 s of processor time instead of 1.7. Waiting gets long, too: not for what measures that.
set -euo pipefail

case "${1:-}" in
busy) values=(latency_ns=120000000 min_granularity_ns=60000000 wakeup_granularity_ns=100000000) ;;
normal) values=(latency_ns=6000000 min_granularity_ns=750000 wakeup_granularity_ns=1000000) ;;
*)
	echo "usage: $0 busy|normal" >&2
	exit 2
	;;
esac
[ "${AGENTRUN_TESTBED:-}" = 1 ] || {
	echo "$0: this is for a testbed machine: build/testbed exec $0 $1" >&2
	exit 1
}
knobs=/sys/kernel/debug/sched
[ -d $knobs ] || mount -t debugfs debugfs /sys/kernel/debug
for v in "${values[@]}"; do echo "${v#*=}" >"$knobs/${v%=*}"; done
