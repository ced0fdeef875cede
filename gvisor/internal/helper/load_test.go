package helper

import (
	"bytes"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
)

// TestHold: a restore gets the list of pages when it is released, and an empty list
// when it is abandoned.
func TestHold(t *testing.T) {
	list := bytes.Repeat([]byte("pages"), 100_000) // more than a pipe holds
	var got []byte
	begin := func() *loading {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		return hold(list, w, func() (err error) {
			defer func() { _ = r.Close() }()
			if got, err = io.ReadAll(r); len(got) == 0 {
				err = io.ErrUnexpectedEOF
			}
			return err
		})
	}
	if err := begin().release(); err != nil || !bytes.Equal(got, list) {
		t.Errorf("released: %d bytes, %v", len(got), err)
	}
	if err := begin().abandon(); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("abandoned: %v", err)
	}
}

// TestHoldFails: release returns the reason of a restore that has failed by itself.
func TestHoldFails(t *testing.T) {
	failed := errors.New("no such checkpoint")
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	l := hold(bytes.Repeat([]byte("pages"), 100_000), w, func() error { return errors.Join(failed, r.Close()) })
	if err := l.release(); !errors.Is(err, failed) || strings.Contains(err.Error(), "pipe") {
		t.Error(err)
	}
}

// TestLoadRefuses: a sandbox that runs, or that has loaded a checkpoint, cannot load
// one.
func TestLoadRefuses(t *testing.T) {
	s := &sandboxed{running: true}
	if err := s.load(runFiles{}, nil); !errors.Is(err, errRuns) {
		t.Error(err)
	}
	s = &sandboxed{}
	if err := s.pause(); !errors.Is(err, errNotRunning) {
		t.Errorf("pause: %v", err)
	}
	if _, err := s.checkpoint(nil); !errors.Is(err, errNotRunning) {
		t.Errorf("checkpoint: %v", err)
	}
	s.ahead = &loading{}
	if err := s.load(runFiles{}, nil); !errors.Is(err, errLoaded) || !s.loaded() {
		t.Errorf("load again: %v", err)
	}
}
