package gvisor

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/enginetest"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/storage/image"
)

// nodeRoot returns an EROFS image of a root with this machine's Node and the
// libraries that it is linked with.
func nodeRoot(t *testing.T) *os.File {
	t.Helper()
	node, err := exec.LookPath("node")
	if err != nil {
		t.Fatal(err, "(run scripts/packages.sh)")
	}
	dir := t.TempDir()
	root := filepath.Join(dir, "root")
	script := `set -e
../../guest/rootfs/busybox.sh "$1"
cp -L "$2" "$1/bin/node"
for library in $(ldd "$2" | grep -o '/[^ ]*'); do
	mkdir -p "$1/$(dirname "$library")"
	cp -L "$library" "$1/$library"
done`
	if out, err := exec.Command("bash", "-c", script, "bash", root, node).CombinedOutput(); err != nil {
		t.Fatalf("make a root with Node: %v\n%s", err, out)
	}
	path := filepath.Join(dir, "root.erofs")
	if err := image.FromDir(context.Background(), root, path); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// TestNodeForks: a Node interpreter has drawn random numbers before it is
// forked, so its generators are seeded and its caches full. It draws different
// numbers in each fork and in the source.
func TestNodeForks(t *testing.T) {
	e := newEngine(t, config(enginetest.TempDir(t)))
	s := spec(t)
	s.Root, s.Memory = nodeRoot(t), 512*mib
	source, err := e.Boot(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = source.Close() })
	run := func(sb engine.Sandbox, code string) []string {
		t.Helper()
		var stdout, stderr bytes.Buffer
		status, err := sb.Agent().RunCode(t.Context(), guestrpc.CodeRunRequest{Language: "node", Source: code}, &stdout, &stderr, nil)
		if err != nil || status.State != guestrpc.CodeOK {
			t.Fatalf("%+v, %v, stderr %q", status, err, &stderr)
		}
		return strings.Fields(stdout.String())
	}
	ways := []string{
		"crypto.randomBytes(16).toString('hex')",
		"(await util.promisify(crypto.randomBytes)(16)).toString('hex')",
		"crypto.randomFillSync(Buffer.alloc(16)).toString('hex')",
		"crypto.randomInt(2 ** 47)",
		"await util.promisify(crypto.randomInt)(2 ** 47)",
		"crypto.randomUUID()",
		"crypto.webcrypto.randomUUID()",
		"crypto.webcrypto.getRandomValues(new BigUint64Array(1))[0]",
		"Math.random()",
	}
	var draw strings.Builder
	for _, w := range ways {
		fmt.Fprintf(&draw, "console.log(String(%s));\n", w)
	}
	run(source, "const crypto = require('crypto'), util = require('util');"+draw.String())
	f, err := source.Fork(t.Context(), make([]engine.ForkOptions, 2))
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]string{}
	for i, sb := range append([]engine.Sandbox{source}, f.Forks...) {
		if i > 0 {
			if f.Errs[i-1] != nil {
				t.Fatal(f.Errs[i-1])
			}
			t.Cleanup(func() { _ = sb.Close() })
		}
		values := run(sb, draw.String())
		if len(values) != len(ways) {
			t.Fatalf("%d values: %q", len(values), values)
		}
		for k, v := range values {
			who := fmt.Sprintf("%s in sandbox %d", ways[k], i)
			if before, twice := seen[v]; twice {
				t.Errorf("%s and %s are both %s", before, who, v)
			}
			seen[v] = who
		}
	}
}
