package rest

import (
	"encoding/json"
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

// TestPagesOfSandboxesByBytes: the same of sandboxes with much metadata, those that run and
// those that have ended, and of their checkpoints, whose records have it, too. Of pools and
// forks, which are small, internal/node reads pages by bytes.
func TestPagesOfSandboxesByBytes(t *testing.T) {
	n := newNode(t)
	n.setUp()
	metadata := rest.Metadata{} // about 250 KiB
	for i := range 61 {
		metadata[fmt.Sprint("k", i)] = strings.Repeat("x", 4096)
	}
	const count = 9
	var want []string
	for i := range count {
		name := fmt.Sprint("s", i)
		n.do("POST", v1+"/sandboxes", rest.SandboxCreate{Name: name, Pool: "pool", Metadata: metadata}).ok(201)
		n.do("POST", v1+"/sandboxes/"+name+"/checkpoints", rest.CheckpointCreate{Name: name}).ok(201)
		want = append(want, name)
	}
	// read reads a list to its end. Pages with as much as they may have are refused.
	read := func(path string, most int) {
		t.Helper()
		var got []string
		pages := 0
		for after := ""; pages == 0 || after != ""; pages++ {
			answer := n.do("GET", v1+path+"limit=100&after="+after, nil).ok(200)
			var page struct {
				Items []struct{ Name string }
				Next  string
			}
			if err := json.Unmarshal(answer.body, &page); err != nil {
				t.Fatal(err)
			}
			if len(answer.body) > 2<<20 || len(page.Items) > most {
				t.Errorf("%s: a page has %d objects, %d bytes", path, len(page.Items), len(answer.body))
			}
			for _, one := range page.Items {
				got = append(got, one.Name)
			}
			after = page.Next
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s in %d pages: %q", path, pages, got)
		}
	}
	read("/sandboxes?", 5)
	read("/checkpoints?", count) // as lists show them, they are small
	for _, name := range want {
		n.do("DELETE", v1+"/sandboxes/"+name, nil).ok(200)
	}
	read("/sandboxes?ended=true&", 5)
}
