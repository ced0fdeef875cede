package vmmserver

import (
	"bytes"
	"io"
	"os"
	"testing"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm/vmmctl"
)

// askStream asks for a stream and returns the reading ends of the pipes for
// memory and disk.
func askStream(t *testing.T, c *vmmctl.Conn, m *vmmctl.Save, state *os.File) (mem, disk *os.File) {
	t.Helper()
	pagemap, err := os.Open("/proc/self/pagemap")
	if err != nil {
		t.Fatal(err)
	}
	var ours, theirs [2]*os.File
	for i := range ours {
		if ours[i], theirs[i], err = os.Pipe(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ours[i].Close() })
	}
	m.Stream = true
	send(t, c, m, pagemap, state, theirs[0], theirs[1], create(t, "top"))
	for _, f := range []*os.File{pagemap, theirs[0], theirs[1]} {
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return ours[0], ours[1]
}

// blank clears the page at an address in the stored content of some runs.
func blank(t *testing.T, content []byte, runs []extent.Run, address uint64) {
	t.Helper()
	at := uint64(0)
	for _, r := range runs {
		if address >= r.Start && address < r.Start+r.Length {
			clear(content[at+address-r.Start:][:layer.PageSize])
			return
		}
		at += r.Length
	}
	t.Errorf("nothing is stored of the page at %#x", address)
}

// TestStream: the pipes carry exactly the bytes that a Save of the same machine
// stores. If a reader closes its pipe, the stream fails and the machine is
// unharmed.
func TestStream(t *testing.T) {
	p := serve(t)
	disk := layer.Stack{Size: 1 << 20}
	initrd := create(t, "initrd") // data that must be stored
	if _, err := initrd.Write(bytes.Repeat([]byte("initrd"), 1<<20)); err != nil {
		t.Fatal(err)
	}
	send(t, p.Conn, &vmmctl.Boot{
		Memory: memory, VCPUs: 1, HasInitrd: true, Devices: vmmctl.Devices{Disks: []vmmctl.Disk{{ID: "data", Stack: &disk}}},
	}, open(t, "/dev/kvm"), bareGuest(t), initrd, create(t, "top"))
	if r := answer(t, p.Conn, 0); r.Error != "" {
		t.Fatal(r.Error)
	}
	send(t, p.Conn, &vmmctl.Simple{Kind: vmmctl.KindPause, ID: 1})
	if r := answer(t, p.Conn, 1); r.Error != "" {
		t.Fatal(r.Error)
	}
	include := []extent.Run{{Start: memory / 2, Length: 1 << 20}} // zeros, which take no room
	state, mem, change, top := saveFilesFor(t)
	saved := mustSave(t, p.Conn, &vmmctl.Save{ID: 2, Memory: include}, state, mem, change, top)

	memPipe, _ := askStream(t, p.Conn, &vmmctl.Save{ID: 3, Memory: include}, create(t, "state"))
	if _, err := io.CopyN(io.Discard, memPipe, 4096); err != nil {
		t.Fatal(err)
	}
	if err := memPipe.Close(); err != nil {
		t.Fatal(err)
	}
	if r := answer(t, p.Conn, 3); r.Error == "" {
		t.Error("a stream that nobody reads has succeeded")
	}
	memPipe, _ = askStream(t, p.Conn, &vmmctl.Save{ID: 4, Rebase: true}, create(t, "state"))
	if b, err := io.ReadAll(memPipe); err != nil || len(b) > 0 {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	if r := answer(t, p.Conn, 4); r.Error == "" {
		t.Error("a machine was rebased on a stream")
	}

	state = create(t, "state")
	memPipe, diskPipe := askStream(t, p.Conn, &vmmctl.Save{ID: 5, Memory: include}, state)
	got, err := io.ReadAll(memPipe)
	if err != nil {
		t.Fatal(err)
	}
	diskGot, err := io.ReadAll(diskPipe)
	if err != nil {
		t.Fatal(err)
	}
	r := answer(t, p.Conn, 5)
	if r.Error != "" {
		t.Fatal(r.Error)
	}
	again, err := vmmctl.UnmarshalSaved(r.Data)
	if err != nil {
		t.Fatal(err)
	}
	var want bytes.Buffer
	for _, run := range saved.Memory.Runs {
		if _, err := io.Copy(&want, io.NewSectionReader(mem, int64(run.Start), int64(run.Length))); err != nil {
			t.Fatal(err)
		}
	}
	blank(t, got, again.Memory.Runs, generationIDPage)
	blank(t, want.Bytes(), saved.Memory.Runs, generationIDPage)
	if len(got) < 6<<20 || length(again.Memory.Runs) != uint64(len(got)) || !bytes.Equal(got, want.Bytes()) {
		t.Errorf("%d bytes came, of runs of %d, not the %d that a save stores", len(got), length(again.Memory.Runs), want.Len())
	}
	if len(again.Disks) != 1 || length(again.Disks[0].Runs) != uint64(len(diskGot)) {
		t.Errorf("%d bytes of the disk: %+v", len(diskGot), again.Disks)
	}
	if info, err := state.Stat(); err != nil || info.Size() == 0 {
		t.Errorf("the state: %v, %v", info, err)
	}
	send(t, p.Conn, &vmmctl.Simple{Kind: vmmctl.KindResume, ID: 6})
	if r := answer(t, p.Conn, 6); r.Error != "" {
		t.Error(r.Error)
	}
}

// generationIDIn finds the generation id in the stored content of some runs.
func generationIDIn(t *testing.T, content []byte, runs []extent.Run) (id [16]byte) {
	t.Helper()
	at := uint64(0)
	for _, r := range runs {
		if generationIDPage >= r.Start && generationIDPage < r.Start+r.Length {
			copy(id[:], content[at+generationIDPage-r.Start:])
			return id
		}
		at += r.Length
	}
	t.Fatal("the page of the generation id is not stored")
	return id
}

// TestGenerationIDAfterStream: a machine that was streamed may continue, as a paused
// sandbox does after its checkpoint. Its generation id then differs from that of the
// copy.
func TestGenerationIDAfterStream(t *testing.T) {
	p := serve(t)
	disk := layer.Stack{Size: 1 << 20}
	send(t, p.Conn, &vmmctl.Boot{
		Memory: memory, VCPUs: 1, Devices: vmmctl.Devices{Disks: []vmmctl.Disk{{ID: "data", Stack: &disk}}},
	}, open(t, "/dev/kvm"), bareGuest(t), create(t, "top"))
	if r := answer(t, p.Conn, 0); r.Error != "" {
		t.Fatal(r.Error)
	}
	send(t, p.Conn, &vmmctl.Simple{Kind: vmmctl.KindPause, ID: 1})
	if r := answer(t, p.Conn, 1); r.Error != "" {
		t.Fatal(r.Error)
	}
	seen := map[[16]byte]bool{}
	for id := uint64(2); id < 5; id++ {
		include := []extent.Run{{Start: generationIDPage, Length: layer.PageSize}}
		mem, changes := askStream(t, p.Conn, &vmmctl.Save{ID: id, Memory: include}, create(t, "state"))
		content, err := io.ReadAll(mem)
		if err == nil {
			_, err = io.Copy(io.Discard, changes)
		}
		if err != nil {
			t.Fatal(err)
		}
		r := answer(t, p.Conn, id)
		if r.Error != "" {
			t.Fatal(r.Error)
		}
		saved, err := vmmctl.UnmarshalSaved(r.Data)
		if err != nil {
			t.Fatal(err)
		}
		generationID := generationIDIn(t, content, saved.Memory.Runs)
		if seen[generationID] {
			t.Errorf("stream %d: the machine still has the generation id %x, which its copy has", id, generationID)
		}
		seen[generationID] = true
	}
}
