package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/test/soak"
)

// netd is the process that serves the network of a namespace, with the files and
// cgroups that it occupies.
type netd struct {
	pid  int
	held []string // the file of its user id, and its cgroups
}

// netd returns the running netd of the namespace default.
func (s *site) netd(t *testing.T) netd { return s.netdOf(t, "default") }

// netdRecord is the file in which the daemon records the netd of a namespace.
func (s *site) netdRecord(namespace string) string {
	return filepath.Join(s.state, "forkd", "netd", namespace, "process.json")
}

// netdOf returns the running netd of a namespace.
func (s *site) netdOf(t *testing.T, namespace string) netd {
	t.Helper()
	b, err := os.ReadFile(s.netdRecord(namespace))
	if err != nil {
		t.Fatal(err)
	}
	var record struct {
		Process struct {
			PID int `json:"pid"`
		} `json:"process"`
	}
	if err := json.Unmarshal(b, &record); err != nil || record.Process.PID == 0 {
		t.Fatalf("%s: %v", b, err)
	}
	n := netd{pid: record.Process.PID}
	info, err := os.Stat(fmt.Sprintf("/proc/%d", n.pid))
	if err != nil {
		t.Fatalf("the netd does not run: %v", err)
	}
	n.held = []string{filepath.Join("/run/agentrun/jail", strconv.Itoa(int(info.Sys().(*syscall.Stat_t).Uid)))}
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", n.pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(groups)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3) // cgroups(7)
		if len(fields) == 3 && strings.Contains(fields[2], "agentrun") {
			n.held = append(n.held, filepath.Join("/sys/fs/cgroup", fields[1], fields[2]))
		}
	}
	for _, path := range n.held {
		if _, err := os.Stat(path); err != nil {
			t.Fatalf("what a netd occupies is not where the test looks for it: %v", err)
		}
	}
	return n
}

// gone waits until a killed netd is gone, with its files and cgroups. Its successor may
// have its user id.
func (n netd) gone(t *testing.T, successor netd) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for _, path := range n.held {
		for {
			_, err := os.Stat(path)
			if errors.Is(err, fs.ErrNotExist) || path == successor.held[0] {
				break
			}
			if time.Now().After(deadline) {
				t.Errorf("%s is left of a killed netd: %v", path, err)
				break
			}
			time.Sleep(10 * time.Millisecond) // there is no event for it
		}
	}
	if err := syscall.Kill(n.pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("process %d is left of a killed netd: %v", n.pid, err)
	}
}

// transfers downloads repeatedly in the background, and counts. Connections may
// break, but bytes may not be wrong. A file stops it.
const transfers = `
import hashlib, os, socket, sys, time
want = sys.argv[1]
if os.fork():
    os._exit(0)
os.setsid()
null = os.open("/dev/null", os.O_RDWR)
for fd in range(3):
    os.dup2(null, fd)
whole = broken = 0
wrong = ""
while not os.path.exists("/tmp/stop"):
    try:
        # Nothing tells a program that only reads that its netd was killed.
        s = socket.create_connection(("source.example.org", 9001), timeout=15)
        digest, n = hashlib.sha256(), 0
        while True:
            b = s.recv(1 << 16)
            if not b:
                break
            n += len(b)
            digest.update(b)
        got = "whole %d %s" % (n, digest.hexdigest())
        if got == want:
            whole += 1
        else:
            wrong = got
    except OSError as e:
        broken += 1
        time.sleep(0.02)
    with open("/tmp/count.new", "w") as f:
        f.write("%d %d %s\n" % (whole, broken, wrong))
    os.rename("/tmp/count.new", "/tmp/count")
open("/tmp/stopped", "w").close()
`

// await makes requests until one succeeds, and prints how long that took.
const await = `
import sys, time, urllib.request
begin = time.time()
while True:
    try:
        assert urllib.request.urlopen(sys.argv[1], timeout=5).read().startswith(b"hello from")
        break
    except OSError as e:
        if time.time() - begin > 120:
            raise
        time.sleep(0.01)
print("%.3f" % (time.time() - begin))
`

// progress returns the counts of transfers.
func (s *site) progress(t *testing.T, sandbox string) (whole, broken int, wrong string) {
	t.Helper()
	r := s.run(t, sandbox, "cat", "/tmp/count")
	fields := strings.SplitN(r.Stdout, " ", 3)
	if len(fields) != 3 {
		return 0, 0, "" // no transfer has ended yet
	}
	whole, _ = strconv.Atoi(fields[0])
	broken, _ = strconv.Atoi(fields[1])
	return whole, broken, strings.TrimSpace(fields[2])
}

// awaitTransfers waits until that many more transfers have succeeded.
func (s *site) awaitTransfers(t *testing.T, sandbox string, more int) {
	t.Helper()
	begin, _, _ := s.progress(t, sandbox)
	deadline := time.Now().Add(patience)
	for {
		whole, broken, wrong := s.progress(t, sandbox)
		if wrong != "" {
			t.Fatalf("%s: a transfer ended early, or with other bytes, and looked whole: %s", sandbox, wrong)
		}
		if whole >= begin+more {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %d transfers were whole, %d are now, %d broke", sandbox, begin, whole, broken)
		}
	}
}

// descriptors returns how many files the daemon has open.
func (s *site) descriptors(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.daemon.PID()))
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// settles waits until a count of the daemon is at most this.
func (s *site) settles(t *testing.T, what string, most int, count func(testing.TB) int) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; {
		n := count(t)
		if n <= most {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("the daemon has %d %s, not %d at most", n, what, most)
			return
		}
		time.Sleep(10 * time.Millisecond) // there is no event for it
	}
}

// connectedSite has two sandboxes, a and b-1, which run transfers all the time, and a
// server of pages. It calls first before there are sandboxes.
func connectedSite(t *testing.T, first ...func(*site)) *site {
	t.Helper()
	s := newSite(t)
	s.importImage(t, "demo:1", "python.sh")
	s.Name("source.example.org", 60, "25.1.113.50")
	s.Name("www.example.org", 60, "25.1.113.51")
	s.ServeHTTP(t, "25.1.113.51:80", hello)
	src := s.newSource(t, "25.1.113.50:9001", 4<<20)
	src.release()
	go func() {
		for range src.half { // the test does not wait for these
		}
	}()
	for _, do := range first {
		do(s)
	}
	s.pool(t, "demo", 1, "networkPolicy: {egress: deny, allow: [source.example.org, www.example.org]}")
	s.claim(t, "demo", "a")
	s.prints(t, "a", "", "python3", "-c", transfers, src.whole())
	s.awaitTransfers(t, "a", 1)
	s.fork(t, "a", "b", 1, nil)
	s.awaitTransfers(t, "b-1", 1)
	return s
}

// lastEnds gives a namespace one sandbox, which uses its network and is ended. It returns the
// namespace's netd, which keeps running for another minute.
func (s *site) lastEnds(t *testing.T, namespace string) netd {
	t.Helper()
	path := filepath.Join(t.TempDir(), "objects.yaml")
	if err := os.WriteFile(path, []byte(poolOf("demo", 1, "networkPolicy: {allow: [www.example.org]}", s.memory)+"\n---\n"+claimOf("demo", "last")), 0o600); err != nil {
		t.Fatal(err)
	}
	s.must(t, "apply", "-n", namespace, "-f", path)
	s.must(t, "exec", "-n", namespace, "last", "--", "python3", "-c", await, "http://www.example.org/")
	n := s.netdOf(t, namespace)
	s.must(t, "kill", "-n", namespace, "last")
	return n
}

// TestNetdKilled: a killed netd is replaced. Its connections break, new ones work, and
// neither its process nor the daemon leaves anything behind. The netd of a namespace
// that has no sandboxes any more ends, and leaves nothing behind either.
func TestNetdKilled(t *testing.T) {
	var unneeded netd
	s := connectedSite(t, func(s *site) { unneeded = s.lastEnds(t, "other") })
	kill := func() {
		before := s.netd(t)
		if err := syscall.Kill(before.pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		for _, sandbox := range []string{"a", "b-1"} {
			r := s.run(t, sandbox, "python3", "-c", await, "http://www.example.org/")
			if r.ExitCode != 0 {
				t.Fatalf("%s: no connection after a netd was killed: %s", sandbox, r.Stderr)
			}
			t.Logf("%s: a new connection %s s after its program began", sandbox, strings.TrimSpace(r.Stdout))
			s.awaitTransfers(t, sandbox, 1)
		}
		after := s.netd(t)
		if after.pid == before.pid {
			t.Fatal("the netd was not killed")
		}
		before.gone(t, after)
	}
	kill()
	unneeded.gone(t, s.netd(t))
	// The daemon removes the record once the process has ended.
	s.settles(t, "records of the netd that nobody needs", 0, func(testing.TB) int {
		if _, err := os.Stat(s.netdRecord("other")); errors.Is(err, fs.ErrNotExist) {
			return 0
		}
		return 1
	})
	s.client.Close()
	open, goroutines := s.descriptors(t), s.daemon.Goroutines(t)
	for range soak.Count(19, 2) {
		kill()
	}
	// A kill between two transfers breaks no connection.
	for range 20 {
		if _, broken, _ := s.progress(t, "a"); broken > 0 {
			break
		}
		kill()
	}
	s.client.Close()
	// The files and goroutines of connections that are being closed, and those of the count
	// itself, come and go. If each of many kills left some behind, the sum would be larger.
	// TestNothingIsLeftOfKilledNetds counts exactly.
	const few = 4
	s.settles(t, "files open", open+few, s.descriptors)
	s.settles(t, "goroutines", goroutines+few, s.daemon.Goroutines)
	if whole, broken, wrong := s.progress(t, "a"); wrong != "" || broken == 0 {
		t.Errorf("%d transfers whole, %d broken, one wrong: %q; want that kills have broken some", whole, broken, wrong)
	}
}

// TestDaemonKilled: connections survive the daemon, and its successor applies
// policies to them.
func TestDaemonKilled(t *testing.T) {
	s := connectedSite(t)
	// Half of this transfer comes before the kills, the rest afterwards.
	slow := s.newSource(t, "25.1.113.50:9002", 4<<20)
	s.reads(t, "a", slow, "9002", "8002")
	before := s.netd(t)
	for range soak.Count(5, 1) {
		s.daemon.Kill()
		s.daemon.Up(t)
		s.awaitTransfers(t, "a", 2)
	}
	if after := s.netd(t); after.pid != before.pid {
		t.Error("the netd has not survived the daemon")
	}
	slow.release()
	if how, _ := s.outcome(t, "a", "8002"); how != slow.whole() {
		t.Errorf("a transfer during which the daemon was killed: %s; want %s", how, slow.whole())
	}
	if _, broken, wrong := s.progress(t, "a"); broken > 0 || wrong != "" {
		t.Errorf("%d transfers broke while the daemon was gone; wrong: %q", broken, wrong)
	}
	if _, err := s.client.SetNetworkPolicy(t.Context(), "a", rest.NetworkPolicy{Allow: rest.NetworkRules{"source.example.org"}}); err != nil {
		t.Fatal(err)
	}
	s.prints(t, "a", "failed:", "python3", "-c", get, "http://www.example.org/")
	s.prints(t, "b-1", "hello from", "python3", "-c", get, "http://www.example.org/")
	s.claim(t, "demo", "c")
	s.prints(t, "c", "hello from", "python3", "-c", get, "http://www.example.org/")
}
