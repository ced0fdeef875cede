package gvisor

import (
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// TestRemoveCheckpoints: folders of checkpoints that nobody holds are removed, and
// those that are being made are not.
func TestRemoveCheckpoints(t *testing.T) {
	e := &Engine{cfg: Config{Resident: t.TempDir(), RunDir: t.TempDir()}}
	left := filepath.Join(e.cfg.Resident, checkpointPrefix+"left")
	if err := os.Mkdir(left, 0o700); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var tidy sync.WaitGroup
	tidy.Go(func() {
		for {
			if err := e.removeCheckpoints(); err != nil {
				t.Error(err)
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	})
	for range 300 {
		dir, remove, err := e.residentDir()
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "pages"), nil, 0o600); err != nil {
			t.Error(err)
		}
		if err := remove(); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	tidy.Wait()
	if _, err := os.Stat(left); err == nil {
		t.Error("what was left is still there")
	}
}
