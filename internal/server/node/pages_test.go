package node

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/sandbox"
)

// TestPagesByBytes: a list that is larger than a message of gRPC comes in pages that fit.
func TestPagesByBytes(t *testing.T) {
	c := newNodeClient(t)
	var want, got []string
	for i := range 9 {
		k := sandbox.Key{Namespace: sandbox.DefaultNamespace, Name: sandbox.Name(fmt.Sprint("t", i))}
		managertest.Must(c.Manager.ApplyTemplate(t.Context(), k, sandbox.TemplateSpec{
			Image: "x", MilliCPUs: 1000, Memory: 64 << 20, Warmup: &sandbox.Program{Language: "python", Text: strings.Repeat("#", 700<<10)},
		}))(t)
		want = append(want, string(k.Name))
	}
	for after, pages := "", 0; pages == 0 || after != ""; pages++ {
		r := managertest.Must(c.ListTemplates(c.ctx, &nodev1.ListTemplatesRequest{Namespace: "default", Limit: 100, After: after}))(t)
		for _, one := range r.GetTemplates() {
			got = append(got, one.GetName())
		}
		after = r.GetNext()
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}
