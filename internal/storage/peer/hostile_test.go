package peer

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/storage/layer"
	"github.com/klauspost/compress/zstd"
)

// bomb is a small frame that expands to far more than a part.
func bomb(t testing.TB) []byte {
	t.Helper()
	z, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return z.EncodeAll(make([]byte, 512<<20), nil)
}

// TestHostilePeers: whatever one peer does, the content of another one arrives. If there is
// no other, the error names the peer and its fault, and no snapshot is made.
func TestHostilePeers(t *testing.T) {
	snap := source0(t)
	big := bomb(t)
	other := peerOf("other content", second0(makeSnapshot(t, memory(9), memory(8))))
	send := func(what func(p *hostile, ctx context.Context, blob layer.Digest, n uint32, content []byte, each func(uint32, []byte) error) error) func(*hostile) {
		return func(p *hostile) {
			p.read = func(ctx context.Context, blob layer.Digest, ask []uint32, each func(uint32, []byte) error) error {
				return p.honest.Read(ctx, snap.ID(), blob, ask, func(n uint32, content []byte) error {
					return what(p, ctx, blob, n, content, each)
				})
			}
		}
	}
	for name, c := range map[string]struct {
		is  func(*hostile)
		say string
	}{
		"a flipped byte of content": {send(func(_ *hostile, _ context.Context, _ layer.Digest, n uint32, content []byte, each func(uint32, []byte) error) error {
			plain, err := unpackAny(content)
			if err != nil {
				return err
			}
			plain[0]++
			bad, err := pack(plain)
			return errors.Join(err, each(n, bad))
		}), "not what its digest says"},
		"a flipped byte on the way": {send(func(_ *hostile, _ context.Context, _ layer.Digest, n uint32, content []byte, each func(uint32, []byte) error) error {
			bad := bytes.Clone(content)
			bad[len(bad)/2] ^= 1
			return each(n, bad)
		}), "not what its digest says"},
		"a bomb": {send(func(_ *hostile, _ context.Context, _ layer.Digest, n uint32, _ []byte, each func(uint32, []byte) error) error {
			return each(n, big)
		}), "not what its digest says"},
		"more than a part": {send(func(_ *hostile, _ context.Context, _ layer.Digest, n uint32, _ []byte, each func(uint32, []byte) error) error {
			return each(n, make([]byte, MaxContent+1))
		}), "not what its digest says"},
		"nothing in a part": {send(func(_ *hostile, _ context.Context, _ layer.Digest, n uint32, _ []byte, each func(uint32, []byte) error) error {
			return each(n, nil)
		}), "not what its digest says"},
		"another number": {send(func(_ *hostile, _ context.Context, _ layer.Digest, n uint32, content []byte, each func(uint32, []byte) error) error {
			return each(n+1000, content)
		}), "was not asked"},
		"an endless stream": {send(func(_ *hostile, ctx context.Context, _ layer.Digest, n uint32, content []byte, each func(uint32, []byte) error) error {
			for {
				if err := errors.Join(each(n, content), ctx.Err()); err != nil {
					return err
				}
			}
		}), "was not asked"},
		"silence": {func(p *hostile) {
			p.read = func(ctx context.Context, _ layer.Digest, _ []uint32, _ func(uint32, []byte) error) error {
				<-ctx.Done()
				return ctx.Err()
			}
		}, "nothing has come"},
		"fewer parts": {func(p *hostile) {
			p.read = func(context.Context, layer.Digest, []uint32, func(uint32, []byte) error) error { return nil }
		}, "it has sent 0 of"},
		"digests of something else": {func(p *hostile) {
			p.digests = func(d Digests, _ uint32) (Digests, error) { return make(Digests, len(d)), nil }
		}, "not those of the layer"},
		"made up digests, and nothing else": {func(p *hostile) {
			p.digests = func(d Digests, _ uint32) (Digests, error) {
				made := make(Digests, len(d))
				for i := range made {
					made[i] = layer.Digest{1, byte(i)}
				}
				return made, nil
			}
		}, "not what its digest says"},
		"too many digests": {func(p *hostile) {
			p.digests = func(d Digests, _ uint32) (Digests, error) { return append(d[:len(d):len(d)], d...), nil }
		}, "digests where"},
		"no digests": {func(p *hostile) {
			p.digests = func(Digests, uint32) (Digests, error) { return nil, nil }
		}, "tells 0 digests"},
		"another snapshot": {func(p *hostile) { p.honest = other }, "no such snapshot"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			alone := &hostile{honest: peerOf("hostile", snap)}
			c.is(alone)
			alone.name = "hostile"
			o := Options{Sources: []Source{alone}}
			if name == "silence" {
				o.Stall = 300 * time.Millisecond
			}
			f, err := fetchInto(t, t.TempDir(), snap.Manifest(), o)
			var missing *MissingError
			if !errors.As(err, &missing) || !strings.Contains(err.Error(), "hostile: ") || !strings.Contains(err.Error(), c.say) {
				t.Errorf("alone: %v", err)
			}
			f.wantNone(t)
			first := &hostile{honest: peerOf("hostile", snap)}
			c.is(first)
			f, err = fetchInto(t, f.parent, snap.Manifest(), Options{Sources: []Source{first, peerOf("honest", snap)}, late: 50 * time.Millisecond})
			if err != nil {
				t.Fatalf("%v\n%s", err, &f.log)
			}
			f.wantSame(t, snap)
		})
	}
}

func unpackAny(sent []byte) ([]byte, error) {
	z, err := decoder()
	if err != nil {
		return nil, err
	}
	return z.DecodeAll(sent, nil)
}

func second0[T, U any](v T, _ U) T { return v }

// TestSlowPeer: a peer that sends little does not hold up an idle one.
func TestSlowPeer(t *testing.T) {
	snap := source0(t)
	ref := snap.Manifest().Memory.Layers[0]
	slow := &hostile{honest: peerOf("slow", snap)}
	ended := make(chan struct{}, 10)
	slow.read = func(ctx context.Context, blob layer.Digest, ask []uint32, each func(uint32, []byte) error) error {
		if blob != ref.Digest {
			return slow.honest.Read(ctx, snap.ID(), blob, ask, each)
		}
		<-ctx.Done() // until all parts have come from the other peer
		ended <- struct{}{}
		return ctx.Err()
	}
	f, err := fetchInto(t, t.TempDir(), snap.Manifest(), Options{Sources: []Source{slow, peerOf("quick", snap)}, late: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	f.wantSame(t, snap)
	if strings.Contains(f.log.String(), "slow is left out") {
		t.Errorf("it was waited for: %s", &f.log)
	}
}

// TestLiarsListIsForgotten: the next attempt does not use digests that were wrong.
func TestLiarsListIsForgotten(t *testing.T) {
	snap := source0(t)
	liar := &hostile{honest: peerOf("liar", snap)}
	liar.digests = func(d Digests, _ uint32) (Digests, error) { return make(Digests, len(d)), nil }
	f, err := fetchInto(t, t.TempDir(), snap.Manifest(), Options{Sources: []Source{liar}})
	if err == nil {
		t.Fatal("it was believed")
	}
	if f, err = fetchInto(t, f.parent, snap.Manifest(), Options{Sources: []Source{peerOf("honest", snap)}}); err != nil {
		t.Fatal(err)
	}
	f.wantSame(t, snap)
}

// FuzzPart: only content that matches its digest is accepted as a part.
func FuzzPart(f *testing.F) {
	content := bytes.Repeat([]byte("content "), 512)
	sent, err := pack(content)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(sent)
	f.Add(sent[:len(sent)-1])
	f.Add(bomb(f)[:100])
	f.Add([]byte(nil))
	want := digestOf(content)
	f.Fuzz(func(t *testing.T, sent []byte) {
		got, err := unpack(sent, uint64(len(content)), want, nil)
		if err == nil && !bytes.Equal(got, content) {
			t.Errorf("%d other bytes were taken", len(got))
		}
		if err != nil && !errors.Is(err, ErrPart) {
			t.Errorf("%v", err)
		}
	})
}

// FuzzDigests: digests of parts have one form, in messages and in their file.
func FuzzDigests(f *testing.F) {
	b := Blob{Size: 2*PartSize + 1}
	list := Digests{{1}, {}, {3}}
	f.Add(list.encode(b))
	f.Add(list.Page())
	f.Add([]byte(digestsMagic))
	f.Fuzz(func(t *testing.T, in []byte) {
		if got, err := parseDigests(in, b); err == nil && !bytes.Equal(got.encode(b), in) {
			t.Errorf("%x became %x", in, got.encode(b))
		}
		if got, err := ParsePage(in); err == nil && !bytes.Equal(got.Page(), in) {
			t.Errorf("%x became %x", in, got.Page())
		}
	})
}
