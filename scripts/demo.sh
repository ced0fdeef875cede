#!/bin/bash
# Builds what is missing, runs sandboxes and shows what they do: make demo.
# ENGINE=microvm or gvisor chooses the engine; else it is microVMs on hardware KVM
# and gVisor elsewhere.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

engine=${ENGINE:-auto}
agentrun=build/agentrun

# show COMMAND…: prints a command as one would type it, and runs it.
show() {
	local begin status=0 word line='$'
	for word in "$@"; do
		case $word in *[!A-Za-z0-9_./=-]*) word="'$word'" ;; esac
		line+=" $word"
	done
	printf '\n%s\n' "$line"
	begin=$(date +%s%N)
	on_place "$@" || status=$?
	printf '  (exit code %d, %s)\n' $status "$(seconds_since "$begin")"
	return $status
}

# on_place COMMAND…: here, or in the testbed.
on_place() { if [ "$place" = testbed ]; then inside "$@"; else "$@"; fi; }

phase "Debian packages" scripts/packages.sh
phase "programs" build_programs
if [ "$engine" = auto ]; then
	engine=gvisor
	[ "$(where)" != hardware ] || engine=microvm
fi
place=here
case $engine in
gvisor)
	phase "gVisor (a few minutes the first time)" build_gvisor_helper
	;;
microvm)
	phase "guest kernel (a few minutes the first time)" build_kernel
	place=$(where)
	if [ "$place" = testbed ]; then
		phase "QEMU and a kernel for the testbed (a few minutes the first time)" build_testbed
		phase "testbed: this machine has no hardware KVM, so an emulated one with AMD-V" "$build/testbed" start
	fi
	;;
*) die "ENGINE=$engine: microvm or gvisor" ;;
esac

# cached_rootfs NAME: a root filesystem in the cache, by its recipes and the programs in it.
cached_rootfs() {
	local hash
	hash=$(sha256sum guest/rootfs/*.sh guest/rootfs/*.c /usr/bin/python3 | sha256sum | cut -c1-16)
	local dir=$cache/rootfs/$1-$hash
	if [ ! -d "$dir" ]; then # whole or not at all
		rm -rf "$dir.new"
		guest/rootfs/"$1".sh "$dir.new"
		mv "$dir.new" "$dir"
	fi
	ln -sfn "$dir" "$build/$1-rootfs"
}
rm -rf "$build/demo-rootfs" # a folder of earlier versions
phase "a root filesystem of busybox" cached_rootfs busybox
ln -sfn "$(readlink "$build/busybox-rootfs")" "$build/demo-rootfs"
root=build/demo-rootfs

printf '\n== Sandboxes, on %s\n' "$([ "$engine" = gvisor ] && echo gVisor || { [ "$place" = testbed ] && echo "the testbed's KVM" || echo "this machine's KVM"; })"
on_place "$agentrun" doctor || true
show "$agentrun" run --engine "$engine" --rootfs "$root" -- uname -a
show "$agentrun" run --engine "$engine" --rootfs "$root" -- sh -c 'echo "PID 1 is $(cat /proc/1/comm), $(nproc) CPU"'
show "$agentrun" run --engine "$engine" --rootfs "$root" -- sh -c 'echo to stdout; echo to stderr >&2; exit 7' || [ $? -eq 7 ]

phase "a root filesystem with Python" cached_rootfs python
phase "an interpreter, warmed up once and forked three times" on_place scripts/demo-forks.sh "$engine"

printf '\nDone in %s. More: %s run --help' "$(seconds_since "$script_begin")" "$agentrun"
if [ "$place" = testbed ]; then
	printf ' (in the testbed: build/testbed shell; build/testbed stop ends it)'
fi
printf '\n'
