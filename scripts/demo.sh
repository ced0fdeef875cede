#!/bin/bash
# Builds what is missing, boots microVMs and shows what they do: make demo.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

rootfs=$build/demo-rootfs

# show COMMAND…: prints a command as one would type it, and runs it.
show() {
	local begin status=0 word line='$'
	for word in "$@"; do
		case $word in *[!A-Za-z0-9_./=-]*) word="'$word'" ;; esac
		line+=" $word"
	done
	printf '\n%s\n' "$line"
	begin=$(date +%s%N)
	inside "$@" || status=$?
	printf '  (exit code %d, %s)\n' $status "$(seconds_since "$begin")"
	return $status
}

phase "Debian packages" scripts/packages.sh
phase "programs" build_programs
phase "guest kernel (a few minutes the first time)" build_kernel
phase "a root filesystem of busybox" guest/rootfs/busybox.sh "$rootfs"
place=$(where)
if [ "$place" = testbed ]; then
	phase "QEMU for the testbed (a few minutes the first time)" build_testbed_qemu
	phase "testbed: this machine has no hardware KVM, so an emulated one with AMD-V" "$build/testbed" start
fi

agentrun=build/agentrun
root=${rootfs#"$repo"/}
printf '\n== MicroVMs, on %s\n' "$([ "$place" = hardware ] && echo "this machine's KVM" || echo "the testbed's KVM")"
inside "$agentrun" doctor || true
show "$agentrun" run --rootfs "$root" -- uname -a
show "$agentrun" run --rootfs "$root" -- sh -c 'echo "PID 1 is $(cat /proc/1/comm), $(nproc) CPU, clock $(cat /sys/devices/system/clocksource/clocksource0/current_clocksource)"'
show "$agentrun" run --rootfs "$root" -- sh -c 'echo to stdout; echo to stderr >&2; exit 7' || [ $? -eq 7 ]

printf '\nDone in %s. More: %s run --help' "$(seconds_since "$script_begin")" "$agentrun"
if [ "$place" = testbed ]; then
	printf ' (in the testbed: build/testbed shell; build/testbed stop ends it)'
fi
printf '\n'
