package microvm

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/storage/snapshot"
	"agentrun.dev/test/soak"
)

// forkFrom forks a snapshot of a sandbox. The fork ends with the test.
func forkFrom(t *testing.T, e engine.Engine, sb engine.Sandbox, dir string, opts ...snapshot.Option) engine.Sandbox {
	t.Helper()
	snap, err := sb.Snapshot(t.Context(), dir, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = snap.Close() })
	child, err := e.Fork(t.Context(), snap, engine.ForkOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = child.Close() })
	return child
}

// buildDiskWriter compiles testdata/diskwriter.c.
func buildDiskWriter(t *testing.T) *os.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "diskwriter")
	out, err := exec.Command("gcc", "-O2", "-Wall", "-Werror", "-static", "-o", path, "testdata/diskwriter.c").CombinedOutput()
	if err != nil {
		t.Fatalf("compile diskwriter: %v\n%s", err, out)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

const diskWriters = 3

const startDiskWriters = `set -e
mkdir -p /run/writers
i=0
while [ $i -lt %d ]; do
	(/run/diskwriter /dev/vdb $i /run/writers/$i.passes /run/writers/stop 2>/run/writers/$i.error; echo $? >/run/writers/$i.exit) </dev/null >/dev/null 2>&1 &
	i=$((i+1))
done`

// twoMorePasses waits until every writer has made two more passes, or has
// failed.
const twoMorePasses = `cd /run/writers
for w in *.passes; do
	read -r from <$w
	while read -r now <$w; [ "${now:-0}" -lt $((from+2)) ] && ! [ -e ${w%.passes}.exit ]; do usleep 2000; done
done`

// stopDiskWriters ends the writers and prints how each ended.
const stopDiskWriters = `cd /run/writers
touch stop
for w in *.passes; do
	while ! [ -s ${w%.passes}.exit ]; do usleep 2000; done
	echo "$(cat ${w%.passes}.exit)$(cat ${w%.passes}.error)"
done`

// TestBlockInFlight: programs that always have disk requests in flight do not
// notice when their machine is captured, neither in the machine nor in its
// fork. Both continue with their own copy of the disk. The next fork is made
// from the last one.
func TestBlockInFlight(t *testing.T) {
	forEachSMP(t, func(t *testing.T, vcpus int) {
		e := newEngine(t)
		sb, err := e.Boot(t.Context(), engine.Spec{Root: openRoot(t), Memory: 128 * mib, VCPUs: vcpus, Scratch: 16 * mib})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = sb.Close() })
		if _, err := sb.Agent().WriteFile(t.Context(), guestrpc.WriteRequest{Path: "/run/diskwriter", Perm: 0o755}, buildDiskWriter(t)); err != nil {
			t.Fatal(err)
		}
		command(t, sb, fmt.Sprintf(startDiskWriters, diskWriters))
		command(t, sb, fmt.Sprintf(`cd /run/writers; until [ $(cat *.passes 2>/dev/null | wc -l) = %d ]; do usleep 2000; done`, diskWriters))
		dir := t.TempDir()
		for i := range soak.Count(20, 1) {
			child := forkFrom(t, e, sb, filepath.Join(dir, fmt.Sprint(i)))
			command(t, sb, twoMorePasses)
			endWriters(t, sb)
			// Only the fork runs from here on, because machines that write all
			// the time slow each other down.
			if err := sb.Close(); err != nil {
				t.Fatal(err)
			}
			command(t, child, twoMorePasses)
			sb = child
		}
		endWriters(t, sb)
	})
}

// endWriters checks that every writer read back from the disk what it had
// written.
func endWriters(t *testing.T, sb engine.Sandbox) {
	t.Helper()
	want := strings.TrimSpace(strings.Repeat("0\n", diskWriters))
	if got := command(t, sb, stopDiskWriters); got != want {
		t.Errorf("the writers ended with\n%s", got)
	}
}
