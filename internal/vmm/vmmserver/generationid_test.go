package vmmserver

import (
	"os"
	"testing"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm/cpu"
	"agentrun.dev/internal/vmm/vmmctl"
)

// generationIDPage is the address of the guest's generation id, which changes with
// each save. ARCHITECTURE.md lists the address.
const generationIDPage = 0xf0000

// generationIDOf saves a machine without disks and returns the generation id
// that the save captured.
func generationIDOf(t *testing.T, c *vmmctl.Conn, id uint64) (_ [16]byte, saved *vmmctl.Saved, state, mem *os.File) {
	t.Helper()
	state, mem = create(t, "state"), memfd(t)
	include := []extent.Run{{Start: generationIDPage, Length: 4096}}
	saved = mustSave(t, c, &vmmctl.Save{ID: id, Memory: include}, state, mem)
	var generationID [16]byte
	if _, err := mem.ReadAt(generationID[:], generationIDPage); err != nil {
		t.Fatal(err)
	}
	return generationID, saved, state, mem
}

// TestGenerationID: each copy gets a generation id of its own before it runs. A
// machine that was copied gets a new id at that instant, so the copy holds the
// old one.
func TestGenerationID(t *testing.T) {
	for name, live := range map[string]bool{"live": true, "standing still": false} {
		t.Run(name, func(t *testing.T) { testGenerationID(t, live) })
	}
}

func testGenerationID(t *testing.T, live bool) {
	devices := []*os.File{open(t, "/dev/kvm")}
	if live {
		devices = append(devices, open(t, "/dev/userfaultfd"))
	}
	source := serve(t)
	send(t, source.Conn, &vmmctl.Boot{Memory: memory, VCPUs: 2, HasUserfaultfd: live}, append(devices, bareGuest(t))...)
	if r := answer(t, source.Conn, 0); r.Error != "" {
		t.Fatal(r.Error)
	}
	seen := map[[16]byte]string{{}: "no id at all"}
	note := func(who string, id [16]byte) {
		t.Helper()
		if before, twice := seen[id]; twice {
			t.Errorf("%s has the generation id of %s: %x", who, before, id)
		}
		seen[id] = who
	}
	first, saved, state, mem := generationIDOf(t, source.Conn, 1)
	note("the source at its boot", first)
	stack, err := layer.OverlayInPlace(layer.Stack{Size: memory}, layer.Ref{Digest: layer.Digest{1}, Size: memory}, saved.Memory.Runs, saved.Memory.Zeros)
	if err != nil {
		t.Fatal(err)
	}
	second, _, _, _ := generationIDOf(t, source.Conn, 2)
	note("the source after its first capture", second)
	send(t, source.Conn, &vmmctl.Simple{Kind: vmmctl.KindPause, ID: 3})
	if r := answer(t, source.Conn, 3); r.Error != "" {
		t.Fatal(r.Error)
	}
	for id, who := range []string{"the source after its second capture", "the source after a capture during a pause"} {
		generationID, _, _, _ := generationIDOf(t, source.Conn, uint64(4+id))
		note(who, generationID)
	}
	for _, who := range []string{"the first child", "the second child"} {
		child := serve(t)
		spare := &vmmctl.Spare{Memory: stack, VCPUs: 2, Profile: string(cpu.HostV1), HasUserfaultfd: live}
		send(t, child.Conn, spare, append(devices, mem)...)
		send(t, child.Conn, &vmmctl.Load{ID: 1}, state)
		for _, id := range []uint64{0, 1} {
			if r := answer(t, child.Conn, id); r.Error != "" {
				t.Fatal(r.Error)
			}
		}
		generationID, _, _, _ := generationIDOf(t, child.Conn, 2)
		note(who, generationID)
	}
}
