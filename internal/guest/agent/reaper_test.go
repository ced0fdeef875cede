package agent

import (
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func TestABISizes(t *testing.T) {
	if n := unsafe.Sizeof(childInfo{}); n != 128 {
		t.Errorf("siginfo_t has 128 bytes, ours %d", n)
	}
	if n := unsafe.Sizeof(rtentry{}); n != 120 {
		t.Errorf("struct rtentry has 120 bytes, ours %d", n)
	}
}

func TestParseStat(t *testing.T) {
	for stat, want := range map[string]struct {
		group, session int
		ok             bool
	}{
		"7 (sh) S 1 7 5 0 -1 ":         {7, 5, true},
		"7 (a) b) (c) R 1 8 6 0 -1 ":   {8, 6, true},
		"7 (sh) Z 1 7 5 0 -1 ":         {0, 0, false},
		"7 (sh) S 1 x 5 0 ":            {0, 5, false},
		"7 (sh) S 1":                   {0, 0, false},
		"7 (sh)":                       {0, 0, false},
		"":                             {0, 0, false},
		"7 (sh) S 1 7 99999999999999 ": {7, 99999999999999, true},
	} {
		g, s, ok := parseStat([]byte(stat))
		if g != want.group || s != want.session || ok != want.ok {
			t.Errorf("%q: %d %d %v", stat, g, s, ok)
		}
	}
}

// TestOrphansAreReaped plays PID 1 in a process of its own. Otherwise it would take
// the children of os/exec away from other tests.
func TestOrphansAreReaped(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), helperMode+"=orphans")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

func helpOrphans() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return err
	}
	ps := NewProcesses(Config{Orphans: true})
	var execs []*Process
	for i := range 20 {
		// Each process leaves an orphan, and dies at once.
		p, err := ps.Start(ExecSpec{Argv: sh("(setsid sh -c 'exit 3' &) & exit " + strconv.Itoa(i))})
		if err != nil {
			return err
		}
		execs = append(execs, p)
	}
	for i, p := range execs {
		<-p.Done()
		if e, _ := p.Exit(); e.Code != i {
			return errors.New("exit code " + strconv.Itoa(e.Code) + " instead of " + strconv.Itoa(i))
		}
	}
	select {
	case <-ps.awaitChildless():
	case <-time.After(patience):
		return errors.New("children are left")
	}
	if _, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); err != unix.ECHILD {
		return errors.New("a zombie is left")
	}
	// A failed start leaves no child either, although the child had been forked.
	if _, err := ps.Start(ExecSpec{Argv: []string{"/etc/passwd"}}); err == nil || !strings.Contains(err.Error(), "permission") {
		return errors.New("started /etc/passwd")
	}
	<-ps.awaitChildless()
	ps.Close()
	return nil
}
