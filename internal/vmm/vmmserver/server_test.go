package vmmserver

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm/cpu"
	"agentrun.dev/internal/vmm/virtio"
	"agentrun.dev/internal/vmm/vmmctl"
	"agentrun.dev/internal/vmm/vmstate"
	"golang.org/x/sys/unix"
)

// parent is the other end of a server that runs in this process.
type parent struct {
	*vmmctl.Conn
	served chan error
	limit  chan uint64 // the limit of file sizes, which this process does not apply to itself
}

func serve(t *testing.T) *parent {
	t.Helper()
	limit := make(chan uint64, 1)
	p := serveWith(t, func(bytes uint64) error { limit <- bytes; return nil })
	p.limit = limit
	return p
}

func serveWith(t *testing.T, limitFiles func(uint64) error) *parent {
	t.Helper()
	ours, theirs, err := vmmctl.Pair()
	if err != nil {
		t.Fatal(err)
	}
	conn, err := vmmctl.NewConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	server, err := vmmctl.NewConn(theirs)
	if err != nil {
		t.Fatal(err)
	}
	p := &parent{Conn: conn, served: make(chan error, 1)}
	go func() {
		p.served <- Serve(server, limitFiles)
		_ = server.Close()
	}()
	t.Cleanup(func() { _ = conn.Close() })
	return p
}

// send sends a message with files that remain open here.
func send(t *testing.T, c *vmmctl.Conn, m vmmctl.Message, files ...*os.File) {
	t.Helper()
	if err := c.Send(m, files...); err != nil {
		t.Fatal(err)
	}
}

func receive[M vmmctl.Message](t *testing.T, c *vmmctl.Conn) M {
	t.Helper()
	m, _, err := c.Receive()
	if err != nil {
		t.Fatal(err)
	}
	got, ok := m.(M)
	if !ok {
		t.Fatalf("received %#v", m)
	}
	return got
}

// answer waits for the reply to a request.
func answer(t *testing.T, c *vmmctl.Conn, id uint64) *vmmctl.Reply {
	t.Helper()
	r := receive[*vmmctl.Reply](t, c)
	if r.ID != id {
		t.Fatalf("reply to %d, not %d", r.ID, id)
	}
	return r
}

func open(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func create(t *testing.T, name string) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func bareGuest(t *testing.T) *os.File {
	t.Helper()
	f, err := assets.Open(assets.TestGuest)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

const memory = 64 << 20

// saveFilesFor makes the files for a Save of a machine with one layered disk.
func saveFilesFor(t *testing.T) (state, mem, disk, top *os.File) {
	t.Helper()
	return create(t, "state"), memfd(t), create(t, "disk"), create(t, "top")
}

func memfd(t *testing.T) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("memory", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "memory")
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// mustSave asks for a Save and returns the answer.
func mustSave(t *testing.T, c *vmmctl.Conn, m *vmmctl.Save, files ...*os.File) *vmmctl.Saved {
	t.Helper()
	pagemap, err := os.Open("/proc/self/pagemap")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = pagemap.Close() }()
	send(t, c, m, append([]*os.File{pagemap}, files...)...)
	r := answer(t, c, m.ID)
	if r.Error != "" {
		t.Fatal(r.Error)
	}
	saved, err := vmmctl.UnmarshalSaved(r.Data)
	if err != nil {
		t.Fatal(err)
	}
	return saved
}

// mappingsOf counts this process's mappings of a file.
func mappingsOf(t *testing.T, name string) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(b), name)
}

func length(runs []extent.Run) (n uint64) {
	for _, r := range runs {
		n += r.Length
	}
	return n
}

// TestSaveAndRestore: one server saves a machine with a layered disk, another
// continues it, and their answers agree; with userfaultfd and without.
func TestSaveAndRestore(t *testing.T) {
	for name, live := range map[string]bool{"live": true, "standing still": false} {
		t.Run(name, func(t *testing.T) { testSaveAndRestore(t, live) })
	}
}

func testSaveAndRestore(t *testing.T, live bool) {
	p := serve(t)
	disk := layer.Stack{Size: 1 << 20}
	boot := &vmmctl.Boot{
		Memory: memory, VCPUs: 1, HasUserfaultfd: live, HasInitrd: true,
		Devices: vmmctl.Devices{Disks: []vmmctl.Disk{{ID: "data", Stack: &disk}}, MaxFile: memory},
	}
	kvm := open(t, "/dev/kvm")
	devices := []*os.File{kvm}
	if live {
		devices = append(devices, open(t, "/dev/userfaultfd"))
	}
	initrd := create(t, "initrd") // data that can be shared
	if _, err := initrd.Write(bytes.Repeat([]byte("initrd"), 1<<20)); err != nil {
		t.Fatal(err)
	}
	send(t, p.Conn, boot, append(slices.Clone(devices), bareGuest(t), initrd, create(t, "top"))...)
	if r := answer(t, p.Conn, 0); r.Error != "" {
		t.Fatal(r.Error)
	}

	// A machine is saved only if the right files come, running or paused, and
	// continues unchanged afterwards.
	state, mem, change, top := saveFilesFor(t)
	send(t, p.Conn, &vmmctl.Save{ID: 1}, state)
	if r := answer(t, p.Conn, 1); !strings.Contains(r.Error, "1 files came, not 5") {
		t.Fatalf("saved into one file: %q", r.Error)
	}
	saved := mustSave(t, p.Conn, &vmmctl.Save{ID: 2, Rebase: true}, state, mem, change, top)
	if len(saved.Disks) != 1 || len(saved.Memory.Runs) == 0 || saved.Pause == 0 || (saved.WhyCopiedInPause == "") != live {
		t.Fatalf("saved %+v", saved)
	}
	stack, err := layer.OverlayInPlace(layer.Stack{Size: memory}, layer.Ref{Digest: layer.Digest{1}, Size: memory}, saved.Memory.Runs, saved.Memory.Zeros)
	if err != nil {
		t.Fatal(err)
	}
	send(t, p.Conn, &vmmctl.Simple{Kind: vmmctl.KindPause, ID: 3})
	if r := answer(t, p.Conn, 3); r.Error != "" {
		t.Fatal(r.Error)
	}
	state2, mem2, change2, top2 := saveFilesFor(t)
	again := mustSave(t, p.Conn, &vmmctl.Save{ID: 4}, state2, mem2, change2, top2)
	if again.Pause != 0 {
		t.Errorf("a paused machine stood still for %d ns", again.Pause)
	}
	// The second save has ended the lingering of the first.
	if n := mappingsOf(t, "/memfd:memory"); live != (n > 0) {
		t.Errorf("the source has %d mappings of its layer", n)
	}
	if live && length(again.Memory.Runs) > length(saved.Memory.Runs)/4 {
		t.Errorf("%d bytes, then %d bytes of a machine that has not changed", length(saved.Memory.Runs), length(again.Memory.Runs))
	}
	stack, err = layer.OverlayInPlace(stack, layer.Ref{Digest: layer.Digest{2}, Size: memory}, again.Memory.Runs, again.Memory.Zeros)
	if err != nil {
		t.Fatal(err)
	}
	layers := []*os.File{}
	for _, l := range stack.Layers {
		layers = append(layers, map[layer.Digest]*os.File{{1}: mem, {2}: mem2}[l.Digest])
	}

	child := serve(t)
	spare := &vmmctl.Spare{Memory: stack, VCPUs: 1, Profile: string(cpu.HostV1), HasUserfaultfd: live}
	send(t, child.Conn, spare, append(slices.Clone(devices), layers...)...)
	send(t, child.Conn, &vmmctl.Load{ID: 8, Devices: boot.Devices}, state2, create(t, "top"))
	for _, id := range []uint64{0, 8} {
		if r := answer(t, child.Conn, id); r.Error != "" {
			t.Fatal(r.Error)
		}
	}
	for _, c := range []*parent{p, child} {
		if got := <-c.limit; got != memory {
			t.Errorf("files are limited to %d bytes, not %d", got, memory)
		}
	}
	state3, mem3, change3, top3 := saveFilesFor(t)
	mustSave(t, child.Conn, &vmmctl.Save{ID: 5}, state3, mem3, change3, top3)
	for _, c := range []*parent{p, child} {
		send(t, c.Conn, &vmmctl.Simple{Kind: vmmctl.KindStop, ID: 9})
		for {
			m, _, err := c.Receive()
			if err != nil {
				t.Fatal(err)
			}
			if exit, ok := m.(*vmmctl.Exit); ok {
				if exit.Reason != string(vmstate.Stopped) {
					t.Errorf("it ended by %s: %s", exit.Reason, exit.Detail)
				}
				break
			}
		}
		if err := <-c.served; err != nil {
			t.Error(err)
		}
	}
}

// TestParentCloses: without a listener the machine ends with its parent. With
// one it continues, and later parents can do all that the first could.
func TestParentCloses(t *testing.T) {
	kvm := open(t, "/dev/kvm")
	alone := serve(t)
	send(t, alone.Conn, &vmmctl.Boot{Memory: memory, VCPUs: 1}, kvm, bareGuest(t))
	if r := answer(t, alone.Conn, 0); r.Error != "" {
		t.Fatal(r.Error)
	}
	if err := alone.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-alone.served; err != nil {
		t.Error(err)
	}

	path := filepath.Join(t.TempDir(), strings.Repeat("long-", 30), "control")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	listener, err := vmmctl.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	first := serve(t)
	send(t, first.Conn, &vmmctl.Boot{Memory: memory, VCPUs: 1, Devices: vmmctl.Devices{Listen: true}}, kvm, bareGuest(t), listener)
	if r := answer(t, first.Conn, 0); r.Error != "" {
		t.Fatal(r.Error)
	}
	if err := errors.Join(listener.Close(), first.Close()); err != nil {
		t.Fatal(err)
	}
	var parents []*vmmctl.Conn
	for i := range uint64(3) {
		c := dial(t, path)
		send(t, c, &vmmctl.Simple{Kind: vmmctl.KindConsole, ID: i})
		if r := answer(t, c, i); r.Error != "" {
			t.Fatal(r.Error)
		}
		parents = append(parents, c)
	}
	send(t, parents[0], &vmmctl.Simple{Kind: vmmctl.KindStop, ID: 7})
	for _, c := range parents[1:] {
		if exit := receive[*vmmctl.Exit](t, c); exit.Reason != string(vmstate.Stopped) {
			t.Errorf("it ended by %s", exit.Reason)
		}
	}
	if err := <-first.served; err != nil {
		t.Error(err)
	}
}

func dial(t *testing.T, path string) *vmmctl.Conn {
	t.Helper()
	c, err := vmmctl.Dial(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// TestSuccessor: a parent asks for a pause and is killed. The next parent
// resumes the guest, which continues.
func TestSuccessor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control")
	listener, err := vmmctl.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	first := serve(t)
	send(t, first.Conn, &vmmctl.Boot{Memory: memory, VCPUs: 1, Devices: vmmctl.Devices{Listen: true}}, open(t, "/dev/kvm"), bareGuest(t), listener)
	if r := answer(t, first.Conn, 0); r.Error != "" {
		t.Fatal(r.Error)
	}
	for i := range 100 {
		killed := dial(t, path)
		send(t, killed, &vmmctl.Simple{Kind: vmmctl.KindPause, ID: 1})
		if err := killed.Close(); err != nil {
			t.Fatal(err)
		}
		next := dial(t, path)
		send(t, next, &vmmctl.Simple{Kind: vmmctl.KindResume, ID: 2})
		if r := answer(t, next, 2); r.Error != "" {
			t.Fatal(r.Error)
		}
		// Its answer says whether the guest is paused.
		ours, theirs, err := vmmctl.Pair()
		if err != nil {
			t.Fatal(err)
		}
		send(t, next, &vmmctl.Connect{Port: 1, Standby: true, ID: 3}, theirs)
		r := answer(t, next, 3)
		if strings.Contains(r.Error, errPaused.Error()) {
			t.Fatalf("time %d: %s", i, r.Error)
		}
		if err := errors.Join(ours.Close(), theirs.Close(), next.Close()); err != nil {
			t.Fatal(err)
		}
	}
	send(t, first.Conn, &vmmctl.Simple{Kind: vmmctl.KindStop, ID: 4})
	if err := <-first.served; err != nil {
		t.Error(err)
	}
}

// TestRefuses: messages that describe no valid machine are refused, and the
// parent gets the reason.
func TestRefuses(t *testing.T) {
	kvm, guest := open(t, "/dev/kvm"), bareGuest(t)
	empty := create(t, "empty")
	stack := layer.Stack{Size: memory}
	for name, tt := range map[string]struct {
		first vmmctl.Message
		files []*os.File
		want  string
	}{
		"too few files":  {&vmmctl.Boot{Memory: memory, VCPUs: 1}, []*os.File{kvm}, "1 files, not 2"},
		"too many files": {&vmmctl.Boot{Memory: memory, VCPUs: 1}, []*os.File{kvm, guest, empty}, "3 files, not 2"},
		"not KVM":        {&vmmctl.Boot{Memory: memory, VCPUs: 1}, []*os.File{empty, guest}, "API version"},
		"no kernel":      {&vmmctl.Boot{Memory: memory, VCPUs: 1}, []*os.File{kvm, empty}, "kernel"},
		"no vCPU":        {&vmmctl.Boot{Memory: memory}, []*os.File{kvm, guest}, "0 vCPUs"},
		"many vCPUs":     {&vmmctl.Boot{Memory: memory, VCPUs: 1 << 16}, []*os.File{kvm, guest}, "65536 vCPUs"},
		"a spare's file": {&vmmctl.Spare{Memory: stack, VCPUs: 1}, []*os.File{kvm, empty}, "2 files, not 1"},
		"an empty spare": {&vmmctl.Spare{Memory: stack}, []*os.File{kvm}, "0 vCPUs"},
	} {
		t.Run(name, func(t *testing.T) {
			p := serve(t)
			send(t, p.Conn, tt.first, tt.files...)
			if r := answer(t, p.Conn, 0); !strings.Contains(r.Error, tt.want) {
				t.Errorf("error %q does not say %q", r.Error, tt.want)
			}
			if err := <-p.served; err != nil {
				t.Error(err)
			}
		})
	}
	p := serveWith(t, func(uint64) error { return errors.New("no limit is possible") })
	send(t, p.Conn, &vmmctl.Boot{Memory: memory, VCPUs: 1}, kvm, guest)
	if r := answer(t, p.Conn, 0); !strings.Contains(r.Error, "no limit is possible") {
		t.Errorf("without a limit of its files: %q", r.Error)
	}
	if err := <-p.served; err != nil {
		t.Error(err)
	}
	p = serve(t)
	send(t, p.Conn, &vmmctl.Ready{})
	if err := <-p.served; err == nil {
		t.Error("a first message that is neither Boot nor Spare was taken")
	}
}

// TestPlug: an interface gets another wire while the machine runs. An interface
// that does not exist or a descriptor that is not a wire is refused, and the
// machine continues.
func TestPlug(t *testing.T) {
	kvm, guest := open(t, "/dev/kvm"), bareGuest(t)
	pair := func(kind int) (ours, theirs *os.File) {
		fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		ours, theirs = os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
		t.Cleanup(func() { _, _ = ours.Close(), theirs.Close() })
		return ours, theirs
	}
	first, wire := pair(unix.SOCK_DGRAM)
	p := serve(t)
	send(t, p.Conn, &vmmctl.Boot{Memory: memory, VCPUs: 1, Devices: vmmctl.Devices{
		MaxFile: 1 << 30, Nets: []vmmctl.Net{{MAC: [6]byte{2, 0, 0, 0, 0, 1}, MTU: 1500}},
	}}, kvm, guest, wire)
	if r := answer(t, p.Conn, 0); r.Error != "" {
		t.Fatal(r.Error)
	}
	_, second := pair(unix.SOCK_DGRAM)
	for id, tt := range []struct {
		net  uint64
		file *os.File
		want string
	}{
		{1, second, "there is no interface 1"},
		{0, create(t, "no socket"), "network device"},
		{0, second, ""},
	} {
		send(t, p.Conn, &vmmctl.Plug{ID: uint64(id + 1), Net: tt.net}, tt.file)
		if r := answer(t, p.Conn, uint64(id+1)); r.Error != "" != (tt.want != "") || !strings.Contains(r.Error, tt.want) {
			t.Errorf("plugged %s into interface %d: %q, not %q", tt.file.Name(), tt.net, r.Error, tt.want)
		}
	}
	// The vmm has closed its end of the first wire; the test has a copy of that
	// end.
	_ = wire.Close()
	if _, err := first.Write([]byte("frame")); err == nil {
		t.Error("the vmm still has the first wire")
	}
	send(t, p.Conn, &vmmctl.Simple{Kind: vmmctl.KindStop, ID: 9})
	if err := <-p.served; err != nil {
		t.Error(err)
	}
}

// TestSpare: a spare waits, refuses a machine that it cannot continue, and ends
// with its parent.
func TestSpare(t *testing.T) {
	kvm, empty := open(t, "/dev/kvm"), create(t, "empty")
	for name, tt := range map[string]struct {
		next  vmmctl.Message // nil: the parent goes away
		files []*os.File
		want  string // empty: no answer
		fails bool
	}{
		"the parent goes": {},
		"no state":        {next: &vmmctl.Load{ID: 5}, files: []*os.File{empty}, want: "no state of a microVM"},
		"no file":         {next: &vmmctl.Load{ID: 5}, want: "0 files, not 1"},
		"too many files":  {next: &vmmctl.Load{ID: 5}, files: []*os.File{empty, empty}, want: "2 files, not 1"},
		"another spare":   {next: &vmmctl.Spare{Memory: layer.Stack{Size: memory}, VCPUs: 1}, files: []*os.File{kvm}, fails: true},
		"a request":       {next: &vmmctl.Simple{Kind: vmmctl.KindPause, ID: 1}, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			p := serve(t)
			send(t, p.Conn, &vmmctl.Spare{Memory: layer.Stack{Size: memory}, VCPUs: 2}, kvm)
			if r := answer(t, p.Conn, 0); r.Error != "" {
				t.Fatal(r.Error)
			}
			if tt.next == nil {
				if err := p.Close(); err != nil {
					t.Fatal(err)
				}
			} else {
				send(t, p.Conn, tt.next, tt.files...)
			}
			if tt.want != "" {
				if r := answer(t, p.Conn, 5); !strings.Contains(r.Error, tt.want) {
					t.Errorf("error %q does not say %q", r.Error, tt.want)
				}
			}
			if err := <-p.served; (err != nil) != tt.fails {
				t.Errorf("it ended with %v", err)
			}
		})
	}
}

// TestRates: the limits of a disk reach the device.
func TestRates(t *testing.T) {
	s := &server{limitFiles: func(uint64) error { return nil }, files: []*os.File{create(t, "disk")}}
	out, err := s.devices(&vmmctl.Devices{Disks: []vmmctl.Disk{{BytesPerSecond: 1000, OpsPerSecond: 10}}})
	if err != nil {
		t.Fatal(err)
	}
	if want := (virtio.Rate{Bytes: 1000, Ops: 10}); out.Disks[0].Rate != want {
		t.Errorf("rate %+v, want %+v", out.Disks[0].Rate, want)
	}
}
