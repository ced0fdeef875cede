package vmmserver

import (
	"os"
	"testing"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/vmm/cpu"
	"agentrun.dev/internal/vmm/vmmctl"
)

// generationPage is where a guest's generation id is; ARCHITECTURE.md has it.
const generationPage = 0xf0000

// generationOf saves a machine without disks and says which generation id was
// captured.
func generationOf(t *testing.T, c *vmmctl.Conn, id uint64) (_ [16]byte, saved *vmmctl.Saved, state, mem *os.File) {
	t.Helper()
	state, mem = create(t, "state"), memfd(t)
	include := []extent.Run{{Start: generationPage, Length: 4096}}
	saved = mustSave(t, c, &vmmctl.Save{ID: id, Memory: include}, state, mem)
	var generation [16]byte
	if _, err := mem.ReadAt(generation[:], generationPage); err != nil {
		t.Fatal(err)
	}
	return generation, saved, state, mem
}

// TestGeneration: each copy has a generation id of its own before it runs, and
// so has a machine that was copied, from that instant on: what is captured is
// the id of before.
func TestGeneration(t *testing.T) {
	for name, live := range map[string]bool{"live": true, "standing still": false} {
		t.Run(name, func(t *testing.T) { testGeneration(t, live) })
	}
}

func testGeneration(t *testing.T, live bool) {
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
	first, saved, state, mem := generationOf(t, source.Conn, 1)
	note("the source at its boot", first)
	image, err := layer.OverlayInPlace(layer.Image{Size: memory}, layer.Ref{Digest: layer.Digest{1}, Size: memory}, saved.Memory.Runs, saved.Memory.Zeros)
	if err != nil {
		t.Fatal(err)
	}
	second, _, _, _ := generationOf(t, source.Conn, 2)
	note("the source after its first capture", second)
	send(t, source.Conn, &vmmctl.Simple{Kind: vmmctl.KindPause, ID: 3})
	if r := answer(t, source.Conn, 3); r.Error != "" {
		t.Fatal(r.Error)
	}
	for id, who := range []string{"the source after its second capture", "the source after a capture during a pause"} {
		generation, _, _, _ := generationOf(t, source.Conn, uint64(4+id))
		note(who, generation)
	}
	for _, who := range []string{"the first child", "the second child"} {
		child := serve(t)
		shell := &vmmctl.Shell{Memory: image, VCPUs: 2, Profile: string(cpu.HostV1), HasUserfaultfd: live}
		send(t, child.Conn, shell, append(devices, mem)...)
		send(t, child.Conn, &vmmctl.Load{ID: 1}, state)
		for _, id := range []uint64{0, 1} {
			if r := answer(t, child.Conn, id); r.Error != "" {
				t.Fatal(r.Error)
			}
		}
		generation, _, _, _ := generationOf(t, child.Conn, 2)
		note(who, generation)
	}
}
