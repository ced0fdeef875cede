package agent

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/guest/guestrpc"
)

var (
	secret  = bytes.Repeat([]byte("secret"), 8)
	forkID  = strings.Repeat("0f", 16)
	forkNow = time.Unix(1900000000, 123456789)
)

func renewal(generation uint64) *guestrpc.RenewRequest {
	return &guestrpc.RenewRequest{
		Entropy: bytes.Clone(secret), WallClock: forkNow, Hostname: "fork-1", MachineID: forkID, Generation: generation,
	}
}

// fakeInterpreter replaces the system calls that would change the host.
type fakeInterpreter struct {
	mu    sync.Mutex // protects all following fields
	calls []string
	fail  map[string]error
	pool  []byte // the argument of RNDADDENTROPY, copied
	given []byte // the argument itself
	clock unix.Timespec
}

func (k *fakeInterpreter) call(name string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.calls = append(k.calls, name)
	return k.fail[name]
}

func (k *fakeInterpreter) ioctl(fd int, req uint, arg unsafe.Pointer) error {
	switch req {
	case unix.RNDADDENTROPY:
		// The caller has to pass 8 bytes, and as many more as the second four state.
		size := binary.NativeEndian.Uint32(unsafe.Slice((*byte)(arg), 8)[4:])
		k.mu.Lock()
		k.given = unsafe.Slice((*byte)(arg), 8+size)
		k.pool = bytes.Clone(k.given)
		k.mu.Unlock()
		return k.call("add entropy")
	case unix.RNDRESEEDCRNG:
		return k.call("reseed")
	}
	return syscall.ENOTTY
}

func (k *fakeInterpreter) setClock(clock int32, to *unix.Timespec) error {
	if clock != unix.CLOCK_REALTIME {
		return syscall.EINVAL
	}
	k.mu.Lock()
	k.clock = *to
	k.mu.Unlock()
	return k.call("set clock")
}

func (k *fakeInterpreter) setHostname(name string) error { return k.call("set host name") }

// newTestRenewer makes a Renewer of a root in a temporary folder that looks as after
// boot. It replaces the system calls that would change the host.
func newTestRenewer(t *testing.T) (*Renewer, *fakeInterpreter) {
	t.Helper()
	root := t.TempDir()
	for _, dir := range []string{"/etc", "/run"} {
		if err := os.Mkdir(root+dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	writeTestFile(t, root+"/etc/hostname", "parent\n", 0o644)
	writeTestFile(t, root+"/etc/hosts", "127.0.0.1\tlocalhost\n127.0.1.1\t"+host+"\n10.0.0.1\tother\n", 0o644)
	writeTestFile(t, root+"/etc/machine-id", "parent-id\n", 0o444)
	if err := replaceGeneration(root, []byte("0\n")); err != nil {
		t.Fatal(err)
	}
	k := &fakeInterpreter{fail: map[string]error{}}
	r := NewRenewer()
	r.root, r.ioctl, r.setClock, r.setHostname = root, k.ioctl, k.setClock, k.setHostname
	return r, k
}

const (
	newHosts = "127.0.0.1\tlocalhost\n127.0.1.1\tfork-1\n10.0.0.1\tother\n"
	allCalls = "add entropy, reseed, set clock, set host name"
)

func (k *fakeInterpreter) log() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return strings.Join(k.calls, ", ")
}

// expectNoLeftovers looks for temporary files.
func expectNoLeftovers(t *testing.T, root string) {
	t.Helper()
	for _, pattern := range []string{"/etc/.agentrun*", "/run/agentrun/.agentrun*"} {
		if left, _ := filepath.Glob(root + pattern); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
}

func expectWiped(t *testing.T, req *guestrpc.RenewRequest) {
	t.Helper()
	if slices.Max(append(req.Entropy, 0)) != 0 {
		t.Errorf("the entropy was not wiped: %q", req.Entropy)
	}
}

func TestRenew(t *testing.T) {
	r, k := newTestRenewer(t)
	before := time.Now()
	req := renewal(5)
	reply, err := r.Renew(t.Context(), req)
	if err != nil || reply.Generation != 5 || r.Generation() != 5 {
		t.Fatalf("%+v, %d, %v", reply, r.Generation(), err)
	}
	if low, high := time.Until(forkNow), forkNow.Sub(before); reply.ClockStep < low || reply.ClockStep > high {
		t.Errorf("step %v, want %v to %v", reply.ClockStep, low, high)
	}
	if k.clock.Nano() != forkNow.UnixNano() {
		t.Errorf("clock set to %+v", k.clock)
	}
	if k.log() != allCalls {
		t.Errorf("calls: %s", k.log())
	}
	// struct rand_pool_info: every bit is credited.
	want := binary.NativeEndian.AppendUint32(nil, uint32(8*len(secret)))
	want = append(binary.NativeEndian.AppendUint32(want, uint32(len(secret))), secret...)
	if !bytes.Equal(k.pool, want) {
		t.Errorf("the kernel got %q", k.pool)
	}
	expectWiped(t, req)
	if bytes.Contains(k.given, secret[:6]) {
		t.Errorf("the copy for the kernel was not wiped: %q", k.given)
	}
	if err := errors.Join(
		expectFile(r.root+"/etc/hostname", "fork-1\n"), expectFile(r.root+"/etc/hosts", newHosts),
		expectFile(r.root+"/etc/machine-id", forkID+"\n"), expectFile(r.root+"/run/agentrun/generation", "5\n"),
	); err != nil {
		t.Error(err)
	}
	expectNoLeftovers(t, r.root)
}

// TestRenewKeepsWhatIsNotGiven uses a request with only the required fields.
func TestRenewKeepsWhatIsNotGiven(t *testing.T) {
	r, k := newTestRenewer(t)
	hosts, err := os.ReadFile(r.root + "/etc/hosts")
	if err != nil {
		t.Fatal(err)
	}
	reply, err := r.Renew(t.Context(), &guestrpc.RenewRequest{Entropy: bytes.Clone(secret[:32]), Generation: 1})
	if err != nil || reply != (guestrpc.RenewReply{Generation: 1}) {
		t.Fatalf("%+v, %v", reply, err)
	}
	if k.log() != "add entropy, reseed" {
		t.Errorf("calls: %s", k.log())
	}
	if err := errors.Join(
		expectFile(r.root+"/etc/hostname", "parent\n"), expectFile(r.root+"/etc/hosts", string(hosts)),
		expectFile(r.root+"/etc/machine-id", "parent-id\n"), expectFile(r.root+"/run/agentrun/generation", "1\n"),
	); err != nil {
		t.Error(err)
	}
}

// TestRenewStopsAtTheFirstFailure makes each step fail. All steps before it are done,
// none after it, and the generation never changes.
func TestRenewStopsAtTheFirstFailure(t *testing.T) {
	call := func(name string) func(*testing.T, *Renewer, *fakeInterpreter) func() {
		return func(_ *testing.T, _ *Renewer, k *fakeInterpreter) func() {
			k.fail[name] = syscall.ENODATA
			return func() { delete(k.fail, name) }
		}
	}
	// inTheWay replaces a file by a folder that contains a file.
	inTheWay := func(path string) func(*testing.T, *Renewer, *fakeInterpreter) func() {
		return func(t *testing.T, r *Renewer, _ *fakeInterpreter) func() {
			os.Remove(r.root + path)
			if err := os.Mkdir(r.root+path, 0o755); err != nil {
				t.Fatal(err)
			}
			writeTestFile(t, r.root+path+"/x", "", 0o644)
			return func() { os.RemoveAll(r.root + path) }
		}
	}
	for i, step := range []struct {
		name  string
		spoil func(*testing.T, *Renewer, *fakeInterpreter) (repair func())
		calls string
		said  string
	}{
		{"add entropy", call("add entropy"), "add entropy", "add entropy to /dev/random"},
		{"reseed", call("reseed"), "add entropy, reseed", "reseed from /dev/random"},
		{"clock", call("set clock"), "add entropy, reseed, set clock", "set wall clock"},
		{"host name", call("set host name"), allCalls, "no data"},
		{"machine id", inTheWay("/etc/machine-id"), allCalls, "replace /etc/machine-id"},
		{"generation", inTheWay("/run/agentrun/generation"), allCalls, "replace /run/agentrun/generation"},
	} {
		t.Run(step.name, func(t *testing.T) {
			r, k := newTestRenewer(t)
			repair := step.spoil(t, r, k)
			was := map[string]string{}
			for _, path := range []string{"/etc/hostname", "/etc/hosts", "/etc/machine-id", "/run/agentrun/generation"} {
				b, _ := os.ReadFile(r.root + path)
				was[path] = string(b)
			}
			req := renewal(1)
			reply, err := r.Renew(t.Context(), req)
			if err == nil || !strings.Contains(err.Error(), step.said) {
				t.Fatalf("%+v, %v, want %q", reply, err, step.said)
			}
			if strings.Contains(err.Error(), "secret") {
				t.Errorf("the entropy is shown: %v", err)
			}
			if reply != (guestrpc.RenewReply{}) || r.Generation() != 0 || k.log() != step.calls {
				t.Errorf("%+v, generation %d, calls %s", reply, r.Generation(), k.log())
			}
			expectWiped(t, req)
			if bytes.Contains(k.given, secret[:6]) {
				t.Errorf("the copy for the kernel was not wiped: %q", k.given)
			}
			want := was
			if i >= 4 {
				want["/etc/hostname"], want["/etc/hosts"] = "fork-1\n", newHosts
			}
			if i >= 5 {
				want["/etc/machine-id"] = forkID + "\n"
			}
			for path, text := range want {
				if b, _ := os.ReadFile(r.root + path); string(b) != text {
					t.Errorf("%s holds %q, want %q", path, b, text)
				}
			}
			expectNoLeftovers(t, r.root)
			// The generation is not used up: a later renewal with it succeeds.
			repair()
			if _, err := r.Renew(t.Context(), renewal(1)); err != nil || r.Generation() != 1 {
				t.Errorf("once more: %d, %v", r.Generation(), err)
			}
			if err := expectFile(r.root+"/run/agentrun/generation", "1\n"); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestRenewRefusesAnOldGeneration(t *testing.T) {
	r, k := newTestRenewer(t)
	if _, err := r.Renew(t.Context(), renewal(7)); err != nil {
		t.Fatal(err)
	}
	for _, generation := range []uint64{7, 6, 0} {
		req := renewal(generation)
		_, err := r.Renew(t.Context(), req)
		wantKind(t, err, ErrInvalid)
		if !strings.Contains(err.Error(), "generation "+strconv.FormatUint(generation, 10)) || !strings.Contains(err.Error(), "at 7") {
			t.Error(err)
		}
		expectWiped(t, req)
	}
	if k.log() != allCalls || r.Generation() != 7 {
		t.Errorf("generation %d, calls %s", r.Generation(), k.log())
	}
	if _, err := r.Renew(t.Context(), renewal(8)); err != nil {
		t.Error(err)
	}
}

func TestRenewChecksBeforeItDoesAnything(t *testing.T) {
	r, k := newTestRenewer(t)
	for name, change := range map[string]func(*guestrpc.RenewRequest){
		"no entropy":          func(q *guestrpc.RenewRequest) { q.Entropy = nil },
		"31 bytes of entropy": func(q *guestrpc.RenewRequest) { q.Entropy = q.Entropy[:31] },
		"much entropy":        func(q *guestrpc.RenewRequest) { q.Entropy = make([]byte, guestrpc.MaxEntropy+1) },
		"clock before 1970":   func(q *guestrpc.RenewRequest) { q.WallClock = time.Unix(-1, 0) },
		"host name":           func(q *guestrpc.RenewRequest) { q.Hostname = "-" },
		"long host name":      func(q *guestrpc.RenewRequest) { q.Hostname = strings.Repeat("x", 64) },
		"host name of lines":  func(q *guestrpc.RenewRequest) { q.Hostname = "a\nb" },
		"upper-case id":       func(q *guestrpc.RenewRequest) { q.MachineID = strings.ToUpper(forkID) },
		"short id":            func(q *guestrpc.RenewRequest) { q.MachineID = forkID[1:] },
		"id with dashes":      func(q *guestrpc.RenewRequest) { q.MachineID = forkID[:30] + "-1" },
		"id that is a path":   func(q *guestrpc.RenewRequest) { q.MachineID = strings.Repeat("../x", 8) },
	} {
		req := renewal(1)
		change(req)
		_, err := r.Renew(t.Context(), req)
		if !errors.Is(err, ErrInvalid) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", name, err)
		}
		expectWiped(t, req)
	}
	if k.log() != "" || r.Generation() != 0 {
		t.Errorf("generation %d, calls %s", r.Generation(), k.log())
	}
	if err := errors.Join(expectFile(r.root+"/etc/hostname", "parent\n"), expectFile(r.root+"/run/agentrun/generation", "0\n")); err != nil {
		t.Error(err)
	}
	req := renewal(1)
	req.Entropy = make([]byte, guestrpc.MaxEntropy)
	if _, err := r.Renew(t.Context(), req); err != nil || len(k.pool) != 8+guestrpc.MaxEntropy {
		t.Errorf("the most entropy: %v", err)
	}
}

// TestRenewOneAtATime runs many renewals at once, each with entropy of its own, so
// that their calls can be distinguished.
func TestRenewOneAtATime(t *testing.T) {
	r, k := newTestRenewer(t)
	var order []byte // which renewal made each call
	var who byte
	r.ioctl = func(fd int, req uint, arg unsafe.Pointer) error {
		err := k.ioctl(fd, req, arg)
		k.mu.Lock()
		if req == unix.RNDADDENTROPY {
			who = k.pool[8]
		}
		order = append(order, who)
		k.mu.Unlock()
		time.Sleep(time.Millisecond)
		return err
	}
	r.setHostname = func(name string) error {
		time.Sleep(time.Millisecond)
		k.mu.Lock()
		order = append(order, name[len(name)-1]-'0')
		k.mu.Unlock()
		return nil
	}
	var wg sync.WaitGroup
	var done [9]bool
	for i := 1; i <= 8; i++ {
		wg.Go(func() {
			req := renewal(uint64(i))
			req.Entropy[0], req.Hostname = byte(i), "fork-"+strconv.Itoa(i)
			_, err := r.Renew(t.Context(), req)
			if done[i] = err == nil; err != nil && !errors.Is(err, ErrInvalid) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	last, n := byte(0), 0
	for i := 0; i+2 < len(order); i += 3 {
		if order[i] != order[i+1] || order[i] != order[i+2] || order[i] <= last || !done[order[i]] {
			t.Fatalf("calls by %v, done %v", order, done)
		}
		last, n = order[i], n+1
	}
	if len(order) != 3*n || last != 8 || r.Generation() != 8 {
		t.Errorf("calls by %v, generation %d", order, r.Generation())
	}
	if err := errors.Join(expectFile(r.root+"/run/agentrun/generation", "8\n"), expectFile(r.root+"/etc/hostname", "fork-8\n")); err != nil {
		t.Error(err)
	}
}

func TestRenewThatNobodyWaitsFor(t *testing.T) {
	r, k := newTestRenewer(t)
	ctx, cancel := context.WithCancel(t.Context())
	req := renewal(1)
	done := make(chan error)
	r.renewing.Lock()
	go func() {
		_, err := r.Renew(ctx, req)
		done <- err
	}()
	cancel()
	r.renewing.Unlock()
	if err := <-done; !errors.Is(err, context.Canceled) || k.log() != "" || r.Generation() != 0 {
		t.Errorf("%v, calls %s", err, k.log())
	}
	expectWiped(t, req)
}

// TestReseedForReal uses the host's generator, which more entropy does not harm.
func TestReseedForReal(t *testing.T) {
	r := NewRenewer()
	for _, n := range []int{guestrpc.MinEntropy, 33, guestrpc.MaxEntropy} {
		err := r.reseed(bytes.Repeat([]byte{1}, n))
		if os.Geteuid() == 0 && err != nil {
			t.Errorf("%d bytes: %v", n, err)
		}
		if os.Geteuid() != 0 && !errors.Is(err, ErrPermission) {
			t.Errorf("%d bytes, not as root: %v", n, err)
		}
	}
	fifo := newLifeline(t).path // has a reader
	lonely := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(lonely, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/dev/null", "/no/such/device", fifo, lonely, writeTestFile(t, t.TempDir()+"/file", "x", 0o600)} {
		r := NewRenewer() // its device is not open yet
		r.random = path
		if err := r.reseed(secret); err == nil || !strings.Contains(err.Error(), path) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", path, err)
		}
	}
}
