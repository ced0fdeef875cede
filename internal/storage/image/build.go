package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"agentrun.dev/internal/storage/image/debian"
	"agentrun.dev/internal/storage/image/tree"
)

// BuildOptions say how an image is built.
type BuildOptions struct {
	Names []Reference
	// NoCache builds even if the same recipe was built before; packages may be
	// newer since.
	NoCache bool
	// Log receives the output of the programs that build it.
	Log      io.Writer
	Progress func(Progress)
}

// buildVersion is part of the build key, so that images of an older builder are
// built again.
const buildVersion = 1

// Build makes an image of Debian packages and Python wheels. It does not repeat
// a build of the same recipe from the same archives.
func (s *Store) Build(ctx context.Context, r debian.Recipe, o BuildOptions) (*Image, error) {
	img, err := s.build(ctx, r, o)
	if err != nil {
		return nil, fmt.Errorf("build image: %w", err)
	}
	return img, nil
}

func (s *Store) build(ctx context.Context, r debian.Recipe, o BuildOptions) (_ *Image, err error) {
	if err := r.Validate(); err != nil {
		return nil, err
	}
	report := NewReporter(o.Progress)
	epoch, err := sourceDateEpoch()
	if err != nil {
		return nil, err
	}
	sources, err := r.Sources(ctx)
	if err != nil {
		return nil, err
	}
	key, err := buildKey(r, sources, epoch)
	if err != nil {
		return nil, err
	}
	lock, err := s.lockMaking(ctx, "build-"+key, func() { report.Phase(Progress{Phase: PhaseWait}) })
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	if !o.NoCache {
		img, err := s.built(ctx, key, o.Names)
		if err == nil {
			report.Phase(Progress{Phase: PhaseDone})
			return img, nil
		}
		if !errors.Is(err, ErrNotFound) {
			return nil, err
		}
	}
	w, err := s.newWork(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	root, scratch := filepath.Join(w.dir, "root"), filepath.Join(w.dir, "scratch")
	//nolint:gosec // all users of the image enter its root; the folder above is ours alone
	if err := errors.Join(os.Mkdir(root, 0o755), os.Mkdir(scratch, 0o700)); err != nil {
		return nil, err
	}
	report.Phase(Progress{Phase: PhaseBootstrap})
	err = r.Build(ctx, root, scratch, debian.Options{
		Sources: sources, Log: o.Log, Epoch: epoch, Pip: func() { report.Phase(Progress{Phase: PhasePip}) },
	})
	if err != nil {
		return nil, err
	}
	facts, err := tree.Survey(root)
	if err != nil {
		return nil, err
	}
	report.Phase(Progress{Phase: PhasePack})
	img := &Image{
		Platform: DefaultPlatform, Source: "debian " + r.Suite, Created: time.Now().UTC().Truncate(time.Second),
		Config: buildConfig(r), Unpacked: facts.Bytes, Capabilities: facts.Capabilities, BuildKey: key,
	}
	if err := s.packRoot(ctx, w, root, img, len(facts.WithXattrs) > 0); err != nil {
		return nil, err
	}
	content, err := json.Marshal([]any{img.Root, img.Config})
	if err != nil {
		return nil, err
	}
	img.Digest = newDigest(sha256.Sum256(content))
	if err := s.commit(ctx, w, img, naming{names: o.Names}); err != nil {
		return nil, err
	}
	report.Phase(Progress{Phase: PhaseDone})
	return img, nil
}

// sourceDateEpoch is the time that reproducible builds use for all files
// (reproducible-builds.org/specs/source-date-epoch), if it is set.
func sourceDateEpoch() (time.Time, error) {
	text := os.Getenv("SOURCE_DATE_EPOCH")
	if text == "" {
		return time.Time{}, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 || n > 1<<32 {
		return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH %q: write seconds since 1970", text)
	}
	return time.Unix(n, 0), nil
}

// buildKey is the hash of all inputs of a build.
func buildKey(r debian.Recipe, sources []string, epoch time.Time) (string, error) {
	b, err := json.Marshal(map[string]any{"version": buildVersion, "recipe": r, "sources": sources, "epoch": epoch.Unix(), "platform": DefaultPlatform})
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}

// built finds the newest image of a key.
func (s *Store) built(ctx context.Context, key string, named []Reference) (*Image, error) {
	list, err := s.List()
	if err != nil {
		return nil, err
	}
	for _, e := range list {
		if e.BuildKey != key {
			continue
		}
		// A damaged image is built again.
		if img, err := s.found(ctx, e.Digest, naming{names: named}); err == nil {
			return img, nil
		}
	}
	return nil, ErrNotFound
}

// buildConfig says how programs of a built image are run.
func buildConfig(r debian.Recipe) Config {
	c := Config{
		Env:    []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"},
		Cmd:    []string{"bash"},
		Labels: map[string]string{"dev.agentrun.debian": r.Suite},
	}
	if r.Python() {
		c.Cmd = []string{"python3"}
	}
	return c
}
