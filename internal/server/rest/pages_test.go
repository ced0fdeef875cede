package rest

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/sandbox"
)

// TestPagesByBytes: a page ends where its objects have a MiB, has one object at least, and
// the pages together have all.
func TestPagesByBytes(t *testing.T) {
	n := newNode(t)
	var want []string
	for i := range 9 {
		k := sandbox.Key{Namespace: sandbox.DefaultNamespace, Name: sandbox.Name(fmt.Sprint("t", i))}
		size := 300 << 10
		if i == 4 {
			size = 1 << 20
		}
		managertest.Must(n.Manager.ApplyTemplate(t.Context(), k, sandbox.TemplateSpec{
			Image: "x", MilliCPUs: 1000, Memory: 64 << 20, Warmup: &sandbox.Program{Language: "python", Text: strings.Repeat("#", size)},
		}))(t)
		want = append(want, string(k.Name))
	}
	var got []string
	var pages []int
	for after := ""; len(pages) == 0 || after != ""; {
		answer := n.do("GET", v1+"/templates?limit=100&after="+after, nil).ok(200)
		if len(answer.body) > 3<<20 {
			t.Errorf("a page has %d bytes", len(answer.body))
		}
		page := as[rest.TemplateList](answer)
		for _, one := range page.Items {
			got = append(got, one.Name)
		}
		pages, after = append(pages, len(page.Items)), page.Next
	}
	if !slices.Equal(got, want) || !slices.Equal(pages, []int{4, 1, 4}) {
		t.Errorf("pages of %v: %q", pages, got)
	}
}
