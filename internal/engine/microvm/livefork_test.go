package microvm

import (
	"testing"

	"agentrun.dev/internal/storage/extent"
	"agentrun.dev/internal/storage/layer"
)

// TestWastefulLayers: a live layer of which a stack shows less than a quarter is
// stored again. A layer that is not live never is.
func TestWastefulLayers(t *testing.T) {
	const page = layer.PageSize
	live := liveLayers{}
	runs := []extent.Run{{Length: 16 * page}, {Start: 32 * page, Length: 16 * page}}
	used, hidden := live.add(nil, 64*page, runs, nil), live.add(nil, 64*page, runs, nil)
	durable := layer.Ref{Digest: layer.Digest{1}, Size: 64 * page}
	stack := layer.Stack{Size: 64 * page, Layers: []layer.Ref{used, hidden, durable}, Extents: []layer.Extent{
		{Start: 0, Length: 8 * page, Layer: 0},
		{Start: 8 * page, Length: 7 * page, Layer: 1, Offset: 8 * page},
		{Start: 15 * page, Length: page, Layer: 2, Offset: 15 * page},
	}}
	if err := stack.Validate(); err != nil {
		t.Fatal(err)
	}
	wasteful := live.wasteful(stack)
	for name, tt := range map[string]struct {
		ref  layer.Ref
		want bool
	}{"a quarter": {used, false}, "less": {hidden, true}, "of a snapshot": {durable, false}} {
		if got := wasteful(tt.ref); got != tt.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}
