// Package jailtest gives the jails of tests cgroups of their own, so that tests do
// not disturb each other.
package jailtest

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// Cgroup names the parent of a jail's cgroups after the test. It is removed at the
// end of the test, after all cleanups that were registered later; the jail must have
// removed all groups in it.
func Cgroup(t testing.TB) string {
	t.Helper()
	name := "agentrun-test-" + strconv.Itoa(os.Getpid()) + "-" + strings.ToLower(strings.ReplaceAll(t.Name(), "/", "-"))
	t.Cleanup(func() {
		for _, d := range Groups(t, name, "") {
			if err := os.Remove(d); err != nil {
				t.Errorf("left behind: %v", err)
			}
		}
	})
	return name
}

// Groups lists the folders of a cgroup in all hierarchies: its own for the pattern "",
// or those below it that match.
func Groups(t testing.TB, cgroup, pattern string) (all []string) {
	t.Helper()
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		dirs, err := filepath.Glob(filepath.Join(root, cgroup, pattern))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, dirs...)
	}
	return all
}
