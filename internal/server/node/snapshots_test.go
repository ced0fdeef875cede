package node

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server/remote"
)

// offered builds a template, and gives its snapshot's digest.
func (n *mutualNode) offered() string {
	n.T.Helper()
	ctx := sandbox.WithOwning(n.T.Context())
	managertest.Must(n.Manager.ApplyTemplate(ctx, sandbox.Key{Namespace: "team-a", Name: "py"}, sandbox.TemplateSpec{Image: "python", MilliCPUs: 1000, Memory: sandbox.MinMemory}))(n.T)
	var digest string
	n.Eventually(func() bool {
		s := managertest.Must(n.Manager.Node(ctx))(n.T)
		if len(s.Snapshots) > 0 {
			digest = s.Snapshots[0].Digest
		}
		return digest != ""
	})
	return digest
}

var stateDigest = func() string {
	sum := sha256.Sum256([]byte("state")) // that of nodetest.Capture
	return hex.EncodeToString(sum[:])
}()

// TestSnapshotRoles: parts of snapshots are for nodes alone, offers for principals that look
// after nodes. Only a controller itself or an admin may have a snapshot fetched.
func TestSnapshotRoles(t *testing.T) {
	n := newMutualNode(t, defaultBounds)
	digest := n.offered()
	calls := map[string]func(c nodev1.NodeClient, principal string) error{
		"parts": func(c nodev1.NodeClient, principal string) error {
			_, err := c.GetSnapshotParts(acting(t, pairs(principal)...), &nodev1.GetSnapshotPartsRequest{Snapshot: digest, Layer: stateDigest})
			return err
		},
		"read": func(c nodev1.NodeClient, principal string) error {
			in, err := c.ReadSnapshot(acting(t, pairs(principal)...), &nodev1.ReadSnapshotRequest{Snapshot: digest, Layer: stateDigest, Parts: []uint32{0}})
			if err == nil {
				_, err = in.Recv()
			}
			return err
		},
		"offer": func(c nodev1.NodeClient, principal string) error {
			_, err := c.GetSnapshotOffer(acting(t, pairs(principal)...), &nodev1.GetSnapshotOfferRequest{Digest: digest})
			return err
		},
		"fetch": func(c nodev1.NodeClient, principal string) error {
			_, err := c.FetchSnapshot(acting(t, pairs(principal)...), &nodev1.FetchSnapshotRequest{Namespace: "team-a", Name: "b"})
			return err
		},
	}
	for _, c := range []struct{ component, principal, may string }{
		{"node/n2", "", "parts read"},
		{"controller/c", "", "offer fetch"},
		{"gateway/g", "", "offer"},
		{"controller/c", "kubernetes:team-a", ""},
		{"gateway/g", "gateway-key:aaaaaaaaaaaa admin", "offer fetch"},
		{"gateway/g", "gateway-key:aaaaaaaaaaaa user team-a", ""},
		{"gateway/g", "gateway-key:aaaaaaaaaaaa viewer *", ""},
		{"node/n2", "kubernetes:team-a", ""},
	} {
		client := nodev1.NewNodeClient(n.as(c.component))
		for name, call := range calls {
			err := call(client, c.principal)
			if strings.Contains(c.may, name) {
				if name == "fetch" { // the offer is parsed, and is not valid
					wantRefused(t, err, codes.InvalidArgument, "invalid", "")
				} else if err != nil {
					t.Errorf("%s for %q, %s: %v", c.component, c.principal, name, err)
				}
				continue
			}
			wantRefused(t, err, codes.PermissionDenied, string(sandbox.CodeDenied), "")
		}
	}
	found := 0
	for _, e := range n.Events() {
		if e.Verb == "grpc:ReadSnapshot" && e.Via == "node:n2" && e.Object == digest && e.Code == 200 {
			found++
		}
	}
	if found != 1 {
		t.Errorf("%d reads of a node are in the audit log", found)
	}
}

func pairs(principal string) (out []string) {
	for i, word := range strings.Fields(principal) {
		out = append(out, []string{"agentrun-principal", "agentrun-role", "agentrun-namespaces"}[i], word)
	}
	return out
}

// TestSnapshotsOverTLS: a node reads the digests and the parts of another one's snapshots, and
// gets an error for parts that do not exist.
func TestSnapshotsOverTLS(t *testing.T) {
	n := newMutualNode(t, defaultBounds)
	digest := n.offered()
	s := remote.NewSnapshots(n.as("node/n2"))
	read := sandbox.SnapshotRead{Snapshot: digest, Layer: stateDigest, Parts: []uint32{0}}
	page, err := s.Digests(t.Context(), read, 0)
	if err != nil || hex.EncodeToString(page) != stateDigest {
		t.Errorf("%x, %v", page, err)
	}
	parts := 0
	err = s.Read(t.Context(), read, func(number uint32, content []byte) error {
		parts++
		if number != 0 || len(content) == 0 {
			t.Errorf("part %d: %x", number, content)
		}
		return nil
	})
	if err != nil || parts != 1 {
		t.Errorf("%d parts, %v", parts, err)
	}
	enough := errors.New("enough")
	if err := s.Read(t.Context(), read, func(uint32, []byte) error { return enough }); !errors.Is(err, enough) {
		t.Errorf("%v", err)
	}
	for say, r := range map[string]sandbox.SnapshotRead{
		"no template here has": {Snapshot: strings.Repeat("0", 64), Layer: stateDigest, Parts: []uint32{0}},
		"snapshot: ":           {Snapshot: "../x", Layer: stateDigest, Parts: []uint32{0}},
		"layer: ":              {Snapshot: digest, Layer: "x", Parts: []uint32{0}},
		"is not of that":       {Snapshot: digest, Layer: strings.Repeat("0", 64), Parts: []uint32{0}},
		"no part 1":            {Snapshot: digest, Layer: stateDigest, Parts: []uint32{0, 1}},
		"0 parts":              {Snapshot: digest, Layer: stateDigest},
		"65 parts":             {Snapshot: digest, Layer: stateDigest, Parts: make([]uint32, 65)},
	} {
		err := s.Read(t.Context(), r, func(uint32, []byte) error { return errors.New("sent") })
		if err == nil || !strings.Contains(err.Error(), say) {
			t.Errorf("%s: %v", say, err)
		}
	}
	if _, err := s.Digests(t.Context(), read, 1); err == nil || !strings.Contains(err.Error(), "no part 1") {
		t.Errorf("%v", err)
	}
	// The offer goes through a controller.
	controller := remote.New(n.as("controller/c"))
	o, err := controller.SnapshotOffer(t.Context(), digest)
	if err != nil || o.Digest != digest || o.Revision == "" || o.Stage != sandbox.AfterReady || len(o.Manifest) == 0 {
		t.Errorf("%+v, %v", o, err)
	}
	if _, err := sandbox.ParseBuilt(o.Built); err != nil {
		t.Error(err)
	}
	if _, err := controller.FetchTemplate(t.Context(), sandbox.FetchRequest{
		Key: sandbox.Key{Namespace: "team-a", Name: "py"}, Spec: sandbox.TemplateSpec{Image: "python", MilliCPUs: 1000, Memory: sandbox.MinMemory}, Offer: o,
		Peers: []sandbox.PeerAddress{{Address: "127.0.0.1:1", Node: "n"}},
	}); !sandbox.HasCode(err, sandbox.CodeUnimplemented) { // this daemon has no way to others
		t.Errorf("%v", err)
	}
}

// TestNoSnapshots: a daemon without snapshots that travel says so.
func TestNoSnapshots(t *testing.T) {
	n := &nodeAPI{}
	for _, err := range []error{
		second(n.GetSnapshotOffer(t.Context(), nil)), second(n.FetchSnapshot(t.Context(), nil)), second(n.GetSnapshotParts(t.Context(), nil)),
	} {
		if !sandbox.HasCode(err, sandbox.CodeUnimplemented) {
			t.Errorf("%v", err)
		}
	}
}

func second[T any](_ T, err error) error { return err }
