package gvisor

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/client/local"
	"agentrun.dev/internal/host/assets"
)

// apart runs a bash script with its own /run and /dev/shm, so that the script can count
// agentrun's files there while other processes use the machine's. shm has the mount
// options of /dev/shm. The script finds agentrun in $agentrun and a root filesystem in
// $root.
func apart(t *testing.T, shm, script string) (stdout, stderr string, _ error) {
	t.Helper()
	folder, err := assets.Folder()
	if err != nil {
		t.Fatal(err)
	}
	const setup = `set -eu
mount -t tmpfs tmpfs /run
mount -t tmpfs -o "$3" tmpfs /dev/shm
agentrun=$1 root=$2
`
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "bash", "-c", setup+script, "bash", filepath.Join(folder, "agentrun"), rootImage, shm)
	cmd.Dir = t.TempDir()
	cmd.Env = append(os.Environ(), local.EnvFolder+"="+filepath.Join(cmd.Dir, "state"))
	var said, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &said, &errs
	err = cmd.Run()
	return said.String(), errs.String(), err
}

// TestKilledRun: the next agentrun run removes the leftovers of a killed one.
func TestKilledRun(t *testing.T) {
	stdout, stderr, err := apart(t, "rw", `
mkfifo up
"$agentrun" run --engine gvisor --rootfs "$root" -- sh -c 'echo up; sleep 1000' >up &
read -r line <up
echo "it is $line"
kill -KILL $!
wait $! || echo "exit code $?"
# Its helper ends the sandbox, and then lets go of the lock.
flock /run/agentrun/gvisor/*/lock true
echo "killed: $(ls /run/agentrun/gvisor | wc -l) runtime folder"
"$agentrun" run --engine gvisor --rootfs "$root" -- echo again
echo "after the next: $(ls /run/agentrun/gvisor | wc -l) runtime folders, $(find /dev/shm -mindepth 2 | wc -l) files in memory"
`)
	const want = "it is up\nexit code 137\nkilled: 1 runtime folder\nagain\nafter the next: 0 runtime folders, 0 files in memory\n"
	if err != nil || stdout != want {
		t.Errorf("%v: %q, want %q\n%s", err, stdout, want, stderr)
	}
}

// TestKilledPacking: if agentrun run is killed while it packs a folder, it leaves no files
// of it.
func TestKilledPacking(t *testing.T) {
	stdout, stderr, err := apart(t, "rw", `
mkdir bin folder tmp
printf '#!/bin/sh\nkill -KILL $PPID\n' >bin/mkfs.erofs
chmod +x bin/mkfs.erofs
PATH=$PWD/bin:$PATH TMPDIR=$PWD/tmp "$agentrun" run --engine gvisor --rootfs folder -- true || echo "exit code $?"
echo "$(ls -A tmp | wc -l) files"
`)
	if want := "exit code 137\n0 files\n"; err != nil || stdout != want {
		t.Errorf("%v: %q, want %q\n%s", err, stdout, want, stderr)
	}
}

// TestNoShm: if /dev/shm is not writable, agentrun run says so and how to fix it.
func TestNoShm(t *testing.T) {
	_, stderr, err := apart(t, "ro", `"$agentrun" run --engine gvisor --rootfs "$root" -- echo never`)
	if err == nil || !strings.Contains(stderr, "read-only file system") || !strings.Contains(stderr, "mount a tmpfs on /dev/shm") {
		t.Errorf("%v: %s", err, stderr)
	}
}
