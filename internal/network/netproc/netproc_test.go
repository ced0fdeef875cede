package netproc

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/host/goruntime/goruntimetest"
	"agentrun.dev/internal/host/jail"
	"agentrun.dev/internal/host/jail/jailtest"
	"agentrun.dev/internal/host/procid"
	"agentrun.dev/internal/network/netctl"
	"golang.org/x/sys/unix"
)

// config is the configuration of a netd in a jail of its own. program replaces netd
// unless it is empty.
func config(t *testing.T, program string) (Config, jail.Config) {
	t.Helper()
	jc := jail.Config{Program: program, Folder: t.TempDir(), Cgroup: jailtest.Cgroup(t)}
	j, err := NewJail(jc)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	return Config{Folder: filepath.Join(t.TempDir(), "a", "netd"), Jail: j}, jc
}

func taken(t *testing.T, jc jail.Config) int {
	t.Helper()
	entries, err := os.ReadDir(jc.Folder)
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// TestStartsAndEnds: a folder has one netd, which is found while it runs, and frees
// its resources.
func TestStartsAndEnds(t *testing.T) {
	cfg, jc := config(t, "")
	if _, err := Find(cfg); !errors.Is(err, ErrNone) {
		t.Errorf("a folder that is not there: %v", err)
	}
	p, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(cfg.Folder); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("others may reach the folder: %v, %v", info, err)
	}
	found, err := Find(cfg)
	if err != nil || found.PID() != p.PID() {
		t.Fatalf("found %v, %v", found, err)
	}
	if err := found.Leave(); err != nil {
		t.Error(err)
	}
	if err := found.Leave(); err != nil { // a second time
		t.Error(err)
	}
	if p.Ended() != nil {
		t.Errorf("it has ended: %v", p.Ended())
	}
	if err := p.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := p.Ended(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("one that was killed: %v", err)
	}
	if n := taken(t, jc); n != 0 {
		t.Errorf("%d user ids are taken", n)
	}
	if err := errors.Join(p.Kill(t.Context()), p.Leave()); err != nil { // the process has ended already
		t.Error(err)
	}
	// Its socket and record still exist, and do no harm.
	again, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := Remove(t.Context(), cfg); err != nil {
		t.Error(err)
	}
	<-again.Done()
	if n := taken(t, jc); n != 0 {
		t.Errorf("%d user ids are taken", n)
	}
	if err := Remove(t.Context(), cfg); err != nil { // the netd is gone already
		t.Error(err)
	}
}

// TestFailsToStart: a program that ends at once is reported with its last words, and
// leaves nothing behind.
func TestFailsToStart(t *testing.T) {
	folder, err := assets.Folder()
	if err != nil {
		t.Fatal(err)
	}
	cfg, jc := config(t, filepath.Join(folder, "escapee")) // this program expects another socket
	if _, err := Start(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "read an order") || !strings.Contains(err.Error(), "exit status 1") {
		t.Errorf("a program that ends at once: %v", err)
	}
	if n := taken(t, jc); n != 0 {
		t.Errorf("%d user ids are taken", n)
	}
	if _, err := Find(cfg); !errors.Is(err, ErrNone) {
		t.Errorf("it is found: %v", err)
	}
	missing, _ := config(t, filepath.Join(folder, "no-such-program"))
	if _, err := Start(t.Context(), missing); err == nil {
		t.Error("a program that is not there was started")
	}
}

// TestRecords: a process of an earlier boot, a process that has ended and another
// process with the same number are not mistaken for a netd.
func TestRecords(t *testing.T) {
	cfg, _ := config(t, "")
	if err := os.MkdirAll(cfg.Folder, 0o700); err != nil {
		t.Fatal(err)
	}
	self, err := procid.Of(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	boot, err := procid.BootID()
	if err != nil {
		t.Fatal(err)
	}
	for name, r := range map[string]record{
		"an earlier boot":  {self, "another"},
		"another process":  {procid.ID{PID: self.PID, Start: self.Start + 1}, boot},
		"one that is gone": {procid.ID{PID: 1 << 22, Start: 1}, boot},
	} {
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(cfg.record(), b, 0o600); err != nil {
			t.Fatal(err)
		}
		if p, err := Find(cfg); !errors.Is(err, ErrNone) {
			t.Errorf("%s: %v, %v", name, p, err)
		}
	}
	if err := os.WriteFile(cfg.record(), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Find(cfg); err == nil || errors.Is(err, ErrNone) || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("a damaged record: %v", err)
	}
}

// TestNotWrittenDown: if a daemon dies after it has started a netd and before it has
// written the record, the netd is not found, and no daemon connects to it any more.
func TestNotWrittenDown(t *testing.T) {
	cfg, jc := config(t, "")
	p, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(cfg.record()), p.Leave()); err != nil {
		t.Fatal(err)
	}
	if _, err := Find(cfg); !errors.Is(err, ErrNone) {
		t.Fatalf("a netd without a record: %v", err)
	}
	next, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	c, err := next.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// The netd has reported its own process id, which only a test believes.
	if w := c.Welcome(); int(w.PID) != next.PID() || w.Protocol != netctl.Protocol {
		t.Errorf("process %d answers, not %d", w.PID, next.PID())
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := next.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The first netd ends when its patience runs out; the test ends it earlier.
	if err := unix.Kill(p.PID(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Wait4(p.PID(), nil, 0, nil); err != nil {
		t.Fatal(err)
	}
	if err := cfg.Jail.Sweep(); err != nil {
		t.Error(err)
	}
	if n := taken(t, jc); n != 0 {
		t.Errorf("%d user ids are taken", n)
	}
}

// TestLastWords: of a trace the beginning is returned, and of a log the end.
func TestLastWords(t *testing.T) {
	p := &Process{cfg: Config{Folder: t.TempDir()}}
	if words := p.lastWords(); words != "" {
		t.Errorf("of nothing: %q", words)
	}
	noise := strings.Repeat("level=WARN msg=noise\n", 1000)
	for said, want := range map[string]string{
		"netd: no\n": "netd: no",
		"panic: oh\n\ngoroutine 1 [running]:\n" + noise:                 "panic: oh\n\ngoroutine 1",
		noise + "fatal error: all is lost\n" + noise:                    "fatal error: all is lost",
		noise + "level=WARN msg=\"the last\"\n":                         "level=WARN",
		strings.Repeat("\xff", 10) + "panic: in the middle of a line\n": "�panic: in the middle",
	} {
		if err := os.WriteFile(p.cfg.stderr(), []byte(said), 0o600); err != nil {
			t.Fatal(err)
		}
		words := p.lastWords()
		if !strings.Contains(words, want) || len(words) > maxWords {
			t.Errorf("%.40q: %.60q", said, words)
		}
	}
}

// TestRuntime checks the settings of a netd's runtime: its monitor sleeps long, and
// it leaves half of the processors to the processes at the other ends of its
// connections.
func TestRuntime(t *testing.T) {
	cfg, _ := config(t, "")
	p, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.Kill(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	c, err := p.Dial(t.Context()) // once it answers, the settings are made
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	goruntimetest.OnlyMonitorIsSlow(t, p.PID(), time.Millisecond)
	environ, err := os.ReadFile("/proc/" + strconv.Itoa(p.PID()) + "/environ")
	want := "GOMAXPROCS=" + strconv.Itoa(min(4, max(1, runtime.NumCPU()/2)))
	if err != nil || !slices.Contains(strings.Split(string(environ), "\x00"), want) {
		t.Errorf("its environment is %q, %v; want %s", environ, err, want)
	}
}
