package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// TestWatch: a body that is not read is reported, and one that is read or closed
// is not.
func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var stalls atomic.Int32
		body := watch(io.NopCloser(strings.NewReader("some bytes")), time.Minute, func() { stalls.Add(1) })
		for range 5 {
			time.Sleep(50 * time.Second)
			if _, err := body.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
		}
		if synctest.Wait(); stalls.Load() != 0 {
			t.Error("it was read, and stalled")
		}
		time.Sleep(2 * time.Minute)
		if synctest.Wait(); stalls.Load() != 1 {
			t.Errorf("%d stalls", stalls.Load())
		}
		if _, err := body.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if err := body.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := body.Read(make([]byte, 1)); err != nil { // late
			t.Fatal(err)
		}
		time.Sleep(2 * time.Minute)
		if synctest.Wait(); stalls.Load() != 1 {
			t.Errorf("%d stalls after it was closed", stalls.Load())
		}
	})
}

// repository opens one of the registry's.
func (r *testRegistry) repository(t *testing.T) (Reference, *Repository) {
	t.Helper()
	ref, err := ParseReference(r.host + "/team/thing:1")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := r.options(t).Registries.Open(ref)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(repo.Close)
	return ref, repo
}

// TestRepository: content that is uploaded to a repository can be fetched from
// it, and is sent once.
func TestRepository(t *testing.T) {
	r := newRegistry(t, plainHTTP)
	ref, repo := r.repository(t)
	content := "the content"
	digest, size, err := v1.SHA256(strings.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	d := v1.Descriptor{Digest: digest, Size: size, MediaType: "text/plain"}
	opened := 0
	blob := Blob{Descriptor: d, Open: func() (io.ReadCloser, error) {
		opened++
		return io.NopCloser(strings.NewReader(content)), nil
	}}
	for range 2 {
		// Each is a new process, as far as the library knows.
		again, err := r.options(t).Registries.Open(ref)
		if err != nil {
			t.Fatal(err)
		}
		if err := again.Upload(t.Context(), blob); err != nil {
			t.Fatal(err)
		}
		again.Close()
	}
	if opened != 1 {
		t.Errorf("sent %d times", opened)
	}
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := repo.Fetch(t.Context(), d, f, NewReporter(nil)); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(f.Name()); err != nil || string(b) != content {
		t.Errorf("%q, %v", b, err)
	}
	if _, _, err := repo.Get(t.Context(), repo.Reference()); !errors.Is(err, ErrNotThere) {
		t.Errorf("a tag that is not there: %v", err)
	}
	raw := fmt.Sprintf(`{"schemaVersion":2,"mediaType":%q,"config":{"mediaType":"text/plain","digest":%q,"size":%d},"layers":[]}`, types.OCIManifestSchema1, digest, size)
	if err := repo.Put(t.Context(), repo.Reference(), []byte(raw), types.OCIManifestSchema1); err != nil {
		t.Fatal(err)
	}
	got, desc, err := repo.Get(t.Context(), repo.Reference())
	if err != nil || string(got) != raw || desc.MediaType != types.OCIManifestSchema1 {
		t.Errorf("%s, %+v, %v", got, desc, err)
	}
	if repo.Pinned() || repo.Name() != r.host+"/team/thing" {
		t.Errorf("%s, pinned: %t", repo.Name(), repo.Pinned())
	}
	// An error that has a next step tells it.
	other, err := Registries{}.Open(ref)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if _, _, err := other.Get(t.Context(), ref.ref); err == nil || !strings.Contains(other.Explain(err).Error(), "--plain-http") {
		t.Errorf("%v", err)
	}
}

// TestUploadStops: an upload ends with its context, and says why.
func TestUploadStops(t *testing.T) {
	r := newRegistry(t, plainHTTP)
	_, repo := r.repository(t)
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	r.set(func(_ http.ResponseWriter, req *http.Request) bool {
		if req.Method == http.MethodPatch {
			// A server sees that a client is gone when it has read all of the body.
			_, _ = io.Copy(io.Discard, req.Body) // the connection may break
			cancel(why)
			<-req.Context().Done()
			return true
		}
		return false
	})
	digest, size, err := v1.SHA256(strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	err = repo.Upload(ctx, Blob{Descriptor: v1.Descriptor{Digest: digest, Size: size}, Open: func() (io.ReadCloser, error) {
		return io.NopCloser(strings.NewReader("x")), nil
	}})
	if !errors.Is(err, why) {
		t.Error(err)
	}
}

// TestUploadAccess: an upload takes the credentials and the authority that a pull
// takes, and nothing goes to a registry that is not trusted.
func TestUploadAccess(t *testing.T) {
	r := newRegistry(t, withTLS)
	r.user = "bob"
	ref, err := ParseReference(r.host + "/team/thing:1")
	if err != nil {
		t.Fatal(err)
	}
	digest, size, err := v1.SHA256(strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	opened := false
	upload := func(registries Registries) error {
		repo, err := registries.Open(ref)
		if err != nil {
			t.Fatal(err)
		}
		defer repo.Close()
		return repo.Explain(repo.Upload(t.Context(), Blob{Descriptor: v1.Descriptor{Digest: digest, Size: size}, Open: func() (io.ReadCloser, error) {
			opened = true
			return io.NopCloser(strings.NewReader("x")), nil
		}}))
	}
	dockerConfig(t, r.host, "bob", "secret")
	wantError(t, upload(Registries{}), "--ca-file")
	dockerConfig(t, r.host, "bob", "wrong")
	wantError(t, upload(r.options(t).Registries), "docker login "+r.host)
	if opened {
		t.Error("content was sent")
	}
	dockerConfig(t, r.host, "bob", "secret")
	if err := upload(r.options(t).Registries); err != nil || !opened {
		t.Error(err)
	}
}
