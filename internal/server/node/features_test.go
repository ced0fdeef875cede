package node

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server/remote"
)

// apart is a connection to a daemon of another version: an older one that lacks a feature,
// or a newer one that has more.
type apart struct {
	grpc.ClientConnInterface
	lacks feature
	newer bool
	asked bool // for the missing feature
}

// refuse answers as a daemon that lacks the feature.
func (a *apart) refuse(method string, req any) error {
	if slices.Contains(a.lacks.methods, method) {
		a.asked = true
		return status.Errorf(codes.Unimplemented, "unknown method %s", method)
	}
	if m, ok := req.(proto.Message); ok && a.sets(m.ProtoReflect()) {
		a.asked = true
		return status.Error(codes.InvalidArgument, "fields that this daemon does not know")
	}
	return nil
}

func (a *apart) sets(m protoreflect.Message) (sets bool) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		sets = sets || slices.Contains(a.lacks.fields, f.FullName())
		if !f.IsMap() && !f.IsList() && f.Message() != nil {
			sets = sets || a.sets(v.Message())
		}
		return true
	})
	return sets
}

func (a *apart) Invoke(ctx context.Context, method string, req, answer any, o ...grpc.CallOption) error {
	if err := a.refuse(method, req); err != nil {
		return err
	}
	err := a.ClientConnInterface.Invoke(ctx, method, req, answer, o...)
	if m, ok := answer.(proto.Message); ok && err == nil {
		a.change(m)
	}
	return err
}

// change makes an answer one of the other version.
func (a *apart) change(m proto.Message) {
	if n, ok := m.(*nodev1.NodeStatus); ok {
		n.Features = slices.DeleteFunc(n.Features, func(name string) bool { return name == a.lacks.name })
		if a.newer {
			n.Features = append(n.Features, "of-the-future")
		}
	}
	if a.newer {
		unknown(m)
	}
}

func (a *apart) NewStream(ctx context.Context, d *grpc.StreamDesc, method string, o ...grpc.CallOption) (grpc.ClientStream, error) {
	if err := a.refuse(method, nil); err != nil {
		return nil, err
	}
	s, err := a.ClientConnInterface.NewStream(ctx, d, method, o...)
	return apartStream{s, a}, err
}

type apartStream struct {
	grpc.ClientStream
	*apart
}

func (s apartStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if p, ok := m.(proto.Message); ok && err == nil {
		s.change(p)
	}
	return err
}

// TestOneVersionApart: a client that is newer than the daemon sends only methods and fields
// of the features that the daemon has, and names the missing feature; all else works. An
// older client ignores fields that it does not know.
func TestOneVersionApart(t *testing.T) {
	c := newNodeClient(t)
	c.prepare("default")
	k := func(name sandbox.Name) sandbox.Key { return sandbox.Key{Namespace: "default", Name: name} }
	uses := map[string][]func(*remote.Service) error{ // by feature
		"": {
			func(s *remote.Service) error { _, err := s.Node(c.ctx); return err },
			func(s *remote.Service) error { _, err := s.Pools(c.ctx, "default", sandbox.Page{}); return err },
			func(s *remote.Service) error { _, _, err := s.Pool(c.ctx, k("pool")); return err },
			func(s *remote.Service) error {
				_, _, err := s.Claim(c.ctx, sandbox.ClaimRequest{Key: k("a"), Spec: sandbox.ClaimSpec{Pool: "pool"}})
				return err
			},
			func(s *remote.Service) error { _, err := s.Kill(c.ctx, k("a")); return err },
		},
		"watch": {func(s *remote.Service) error {
			err := s.Watch(c.ctx, sandbox.WatchRequest{}, func(sandbox.Event) error { return errEnough })
			if err == errEnough {
				err = nil
			}
			return err
		}},
		"cordon": {
			func(s *remote.Service) error { _, err := s.Cordon(c.ctx, true); return err },
			func(s *remote.Service) error { _, err := s.Uncordon(c.ctx); return err },
		},
		"images": {
			func(s *remote.Service) error { _, err := s.Images(c.ctx, "default", sandbox.Page{}); return err },
			func(s *remote.Service) error {
				_, err := s.PublishImage(c.ctx, sandbox.PublishRequest{Image: "gone"})
				return not(err, sandbox.CodeNotFound)
			},
			func(s *remote.Service) error { return not(s.UnpublishImage(c.ctx, "gone"), sandbox.CodeNotFound) },
			func(s *remote.Service) error {
				_, err := s.RegistryLogins(c.ctx, "default", sandbox.Page{})
				return err
			},
			func(s *remote.Service) error {
				_, err := s.SetRegistryLogin(c.ctx, "default", "registry.example.com", sandbox.RegistryCredentials{Username: "a", Password: "b"})
				return err
			},
			func(s *remote.Service) error {
				return not(s.DeleteRegistryLogin(c.ctx, "default", "gone.example.com"), sandbox.CodeNotFound)
			},
		},
		"owners": {
			func(s *remote.Service) error {
				_, _, err := s.Claim(c.ctx, sandbox.ClaimRequest{Key: k("o"), Owner: "o", Spec: sandbox.ClaimSpec{Pool: "pool"}})
				return err
			},
			func(s *remote.Service) error {
				err := s.ReleaseOwner(c.ctx, sandbox.ReleaseRequest{Namespace: "default", Owner: "o"})
				return not(err, sandbox.CodeConflict, sandbox.CodeNotFound)
			},
			func(s *remote.Service) error {
				_, err := s.SetToken(c.ctx, k("gone"), sandbox.HashToken("ars_x"))
				return not(err, sandbox.CodeNotFound)
			},
			func(s *remote.Service) error {
				_, err := s.ApplyPool(c.ctx, k("pool-o"), sandbox.PoolSpec{Template: "python"}, "o")
				return err
			},
			func(s *remote.Service) error {
				_, err := s.ApplyTemplate(c.ctx, k("template-o"), sandbox.TemplateSpec{Image: "python", MilliCPUs: 1000, Memory: sandbox.MinMemory}, "o")
				return err
			},
		},
		"fork-children": {
			func(s *remote.Service) error {
				_, _, err := s.Fork(c.ctx, sandbox.ForkRequest{Key: k("f"), Spec: sandbox.ForkSpec{Source: "gone", Replicas: 1, Atomic: true}})
				return not(err, sandbox.CodeNotFound)
			},
			func(s *remote.Service) error {
				_, _, err := s.Fork(c.ctx, sandbox.ForkRequest{Key: k("f"), Spec: sandbox.ForkSpec{Source: "gone", Replicas: 1, Children: []sandbox.ForkChild{{Name: "x"}}}})
				return not(err, sandbox.CodeNotFound)
			},
		},
		"expires": {
			func(s *remote.Service) error {
				_, err := s.SetExpiry(c.ctx, k("gone"), time.Now().Add(time.Hour))
				return not(err, sandbox.CodeNotFound)
			},
			func(s *remote.Service) error {
				life := sandbox.Lifetime{Expires: time.Now().Add(time.Hour)}
				_, _, err := s.Claim(c.ctx, sandbox.ClaimRequest{Key: k("e"), Spec: sandbox.ClaimSpec{Pool: "gone", Lifetime: life}})
				return not(err, sandbox.CodeNotFound)
			},
		},
		"snapshots": {
			func(s *remote.Service) error {
				_, err := s.SnapshotOffer(c.ctx, strings.Repeat("0", 64))
				return not(err, sandbox.CodeNotFound)
			},
			func(s *remote.Service) error {
				_, err := s.FetchTemplate(c.ctx, sandbox.FetchRequest{Key: k("fetched")})
				return not(err, sandbox.CodeInvalid)
			},
		},
		"use": {
			func(s *remote.Service) error {
				_, err := s.Use(c.ctx, k("gone"))
				return not(err, sandbox.CodeNotFound)
			},
			func(s *remote.Service) error {
				_, err := s.SandboxByID(c.ctx, sandbox.NewID())
				return not(err, sandbox.CodeNotFound)
			},
			func(s *remote.Service) error {
				_, _, err := s.SandboxOfToken(c.ctx, sandbox.Token{Derived: sandbox.NewID()})
				return not(err, sandbox.CodeNotFound)
			},
		},
		"template-logs": {func(s *remote.Service) error {
			return s.CopyBuildLog(c.ctx, sandbox.BuildLogRequest{Key: k("python"), Stage: sandbox.AfterReady}, io.Discard)
		}},
		"secrets": {
			func(s *remote.Service) error {
				_, err := s.ApplySecret(c.ctx, k("secret"), sandbox.SecretData{"A": []byte("1")})
				return err
			},
			func(s *remote.Service) error {
				_, err := s.SetSecret(c.ctx, k("secret"), sandbox.SecretData{"B": []byte("1")})
				return err
			},
			func(s *remote.Service) error {
				_, err := s.Secret(c.ctx, k("secret"))
				return err
			},
			func(s *remote.Service) error {
				_, err := s.Secrets(c.ctx, "default", sandbox.Page{})
				return err
			},
			func(s *remote.Service) error { return s.DeleteSecret(c.ctx, k("secret")) },
			func(s *remote.Service) error {
				refs := []sandbox.SecretRef{{Secret: "secret", Key: "A"}}
				_, _, err := s.Claim(c.ctx, sandbox.ClaimRequest{Key: k("s"), Spec: sandbox.ClaimSpec{Pool: "gone", Secrets: refs}})
				return not(err, sandbox.CodeNotFound)
			},
		},
		"quotas": {
			func(s *remote.Service) error {
				_, err := s.SetQuota(c.ctx, sandbox.Quota{Namespace: "other"})
				return err
			},
			func(s *remote.Service) error { _, err := s.QuotaOf(c.ctx, "other"); return err },
		},
		"identity": {
			func(s *remote.Service) error {
				_, _, err := s.Claim(c.ctx, sandbox.ClaimRequest{Key: k("i"), Spec: sandbox.ClaimSpec{Pool: "gone"}, Once: new(sandbox.NewOnce("", "", "", nil))})
				return not(err, sandbox.CodeNotFound)
			},
			func(s *remote.Service) error {
				_, _, err := s.Fork(c.ctx, sandbox.ForkRequest{Key: k("f"), Spec: sandbox.ForkSpec{Source: "gone", Replicas: 1}, Once: new(sandbox.NewOnce("", "", "", nil))})
				return not(err, sandbox.CodeNotFound)
			},
			func(s *remote.Service) error {
				_, _, err := s.Checkpoint(c.ctx, sandbox.CheckpointRequest{Key: k("c"), Source: "gone", Once: new(sandbox.NewOnce("", "", "", nil))})
				return not(err, sandbox.CodeNotFound)
			},
			func(s *remote.Service) error {
				_, _, err := s.Restore(c.ctx, sandbox.RestoreRequest{Key: k("r"), Checkpoint: "gone", Once: new(sandbox.NewOnce("", "", "", nil))})
				return not(err, sandbox.CodeNotFound)
			},
		},
		"preconditions": {
			func(s *remote.Service) error {
				_, err := s.Kill(c.ctx, k("gone"), sandbox.Precondition{Owner: "x"})
				return not(err, sandbox.CodeNotFound)
			},
			func(s *remote.Service) error {
				return not(s.DeletePool(c.ctx, k("gone"), sandbox.Precondition{Version: 1}), sandbox.CodeNotFound)
			},
			func(s *remote.Service) error {
				_, _, err := s.Fork(c.ctx, sandbox.ForkRequest{Key: k("f"), Spec: sandbox.ForkSpec{Source: "gone", Replicas: 1}, When: sandbox.Precondition{ID: sandbox.NewID()}})
				return not(err, sandbox.CodeNotFound)
			},
		},
		"list-all-namespaces": {
			func(s *remote.Service) error { _, err := s.Templates(c.ctx, "", sandbox.Page{}); return err },
			func(s *remote.Service) error { _, err := s.Pools(c.ctx, "", sandbox.Page{}); return err },
			func(s *remote.Service) error {
				_, err := s.Sandboxes(c.ctx, sandbox.SandboxesRequest{})
				return err
			},
			func(s *remote.Service) error { _, err := s.Forks(c.ctx, "", sandbox.Page{}); return err },
			func(s *remote.Service) error { _, err := s.Checkpoints(c.ctx, "", sandbox.Page{}); return err },
		},
	}
	others := []*apart{{ClientConnInterface: c.conn}, {ClientConnInterface: c.conn, newer: true}}
	for _, f := range features {
		if len(uses[f.name]) == 0 {
			t.Errorf("nothing of this test uses %s", f.name)
		}
		others = append(others, &apart{ClientConnInterface: c.conn, lacks: f})
	}
	for _, other := range others {
		s := remote.New(other)
		for name, all := range uses {
			for i, use := range all {
				err := use(s)
				switch lacking := name != "" && name == other.lacks.name; {
				case lacking && (!sandbox.HasCode(err, sandbox.CodeUnimplemented) || !strings.Contains(err.Error(), name)):
					t.Errorf("without %s, its use %d: %v", name, i, err)
				case !lacking && err != nil:
					t.Errorf("without %q, use %d of %q: %v", other.lacks.name, i, name, err)
				}
			}
		}
		if other.asked {
			t.Errorf("a daemon without %s was asked for it", other.lacks.name)
		}
	}
}

// not is an error unless it has one of the codes.
func not(err error, codes ...sandbox.Code) error {
	if slices.ContainsFunc(codes, func(c sandbox.Code) bool { return sandbox.HasCode(err, c) }) {
		return nil
	}
	return err
}

// errEnough ends a watch.
var errEnough = sandbox.Errorf(sandbox.CodeInternal, "enough")

// TestFeaturesAreComplete: each method and each field of a request that the first version of
// the API did not have belongs to a feature.
func TestFeaturesAreComplete(t *testing.T) {
	var got []string
	seen := map[protoreflect.FullName]bool{}
	var walk func(protoreflect.MessageDescriptor)
	walk = func(m protoreflect.MessageDescriptor) {
		if seen[m.FullName()] || !strings.HasPrefix(string(m.FullName()), "agentrun.") {
			return
		}
		seen[m.FullName()] = true
		for i := range m.Fields().Len() {
			f := m.Fields().Get(i)
			got = append(got, string(f.FullName()))
			if f.Message() != nil {
				walk(f.Message())
			}
		}
	}
	later := map[string]bool{}
	for _, f := range features {
		for _, name := range f.fields {
			later[string(name)] = true
		}
		for _, name := range f.methods {
			later[name] = true
		}
	}
	methods := nodev1.File_agentrun_node_v1_node_proto.Services().ByName("Node").Methods()
	for i := range methods.Len() {
		m := methods.Get(i)
		name := "/agentrun.node.v1.Node/" + string(m.Name())
		if got = append(got, name); !later[name] { // the rest came with the method
			walk(m.Input())
		}
	}
	got = slices.DeleteFunc(got, func(name string) bool { return later[name] })
	slices.Sort(got)
	want, err := os.ReadFile(filepath.Join("testdata", "first-version"))
	if err != nil {
		t.Fatal(err)
	}
	if text := strings.Join(got, "\n") + "\n"; text != string(want) {
		t.Errorf("The API has changed: what came with a feature belongs into features, what the first version had into testdata/first-version:\n%s", text)
	}
}
