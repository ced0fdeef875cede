package microvm

import (
	"errors"
	"io"
	"strings"
	"testing"

	"agentrun.dev/internal/layer"
	"agentrun.dev/internal/vmmctl"
)

// TestStreamIsChecked: a vmm that names more or less than it has written, other
// disks, or runs that are not in the image, is not believed.
func TestStreamIsChecked(t *testing.T) {
	const page = layer.PageSize
	wrote := streamed{memory: layer.Ref{Digest: layer.Digest{1}, Size: 2 * page}, disks: []layer.Ref{{}}}
	for name, c := range map[string]struct {
		saved vmmctl.Saved
		want  string
	}{
		"more":      {vmmctl.Saved{Memory: vmmctl.Change{Runs: []layer.Run{{Length: 3 * page}}}, Disks: make([]vmmctl.Change, 1)}, "speaks of 12288 bytes, and has written 8192"},
		"less":      {vmmctl.Saved{Memory: vmmctl.Change{Runs: []layer.Run{{Length: page}}}, Disks: make([]vmmctl.Change, 1)}, "speaks of 4096 bytes"},
		"no disk":   {vmmctl.Saved{Memory: vmmctl.Change{Runs: []layer.Run{{Length: 2 * page}}}}, "disks"},
		"disk":      {vmmctl.Saved{Memory: vmmctl.Change{Runs: []layer.Run{{Length: 2 * page}}}, Disks: []vmmctl.Change{{Runs: []layer.Run{{Length: page}}}}}, "speaks of 4096 bytes, and has written 0"},
		"no state":  {vmmctl.Saved{Memory: vmmctl.Change{Runs: []layer.Run{{Length: 2 * page}}}, Disks: make([]vmmctl.Change, 1)}, "state"},
		"too many":  {vmmctl.Saved{Memory: vmmctl.Change{Runs: []layer.Run{{Length: 1 << 63}, {Length: 1 << 63}, {Length: 2 * page}}}, Disks: make([]vmmctl.Change, 1)}, "run"},
		"elsewhere": {vmmctl.Saved{Memory: vmmctl.Change{Runs: []layer.Run{{Start: 1 << 40, Length: 2 * page}}}, Disks: make([]vmmctl.Change, 1)}, "run"},
	} {
		t.Run(name, func(t *testing.T) {
			got := &captured{stored: &wrote}
			var err error
			if got.state, err = memoryFile("state", nil); err != nil {
				t.Fatal(err)
			}
			defer got.close()
			err = got.verifyStreamed(c.saved.Marshal(), 16*page, []uint64{page})
			if !errors.Is(err, errLie) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, not a lie with %q", err, c.want)
			}
		})
	}
}

// TestCrowdedImages: an image without room for another layer is written in full,
// others are not.
func TestCrowdedImages(t *testing.T) {
	full := layer.Image{Size: 1 << 20, Layers: make([]layer.Ref, layer.MaxLayers)}
	some := layer.Image{Size: 2 << 20, Layers: make([]layer.Ref, 1)}
	d := &sandbox{memory: full, disks: []disk{{readOnly: true, image: some}, {image: some}}}
	save := &vmmctl.Save{Disks: make([][]layer.Run, 1)}
	d.storeCrowded(save, false)
	if len(d.memory.Layers) != 0 || d.memory.Size != full.Size || layer.Total(save.Memory) != full.Size || len(d.disks[1].image.Layers) != 1 || save.Disks[0] != nil {
		t.Errorf("%+v, %+v", d, save)
	}
	d.storeCrowded(save, true)
	if len(d.disks[0].image.Layers) != 1 || len(d.disks[1].image.Layers) != 0 || layer.Total(save.Disks[0]) != some.Size {
		t.Errorf("%+v, %+v", d, save)
	}
}

// TestRunsOf: runs are read one after the other.
func TestRunsOf(t *testing.T) {
	b, err := io.ReadAll(runsOf(strings.NewReader("0123456789"), []layer.Run{{Start: 1, Length: 2}, {Start: 7, Length: 3}}))
	if err != nil || string(b) != "12789" {
		t.Errorf("%q, %v", b, err)
	}
}
