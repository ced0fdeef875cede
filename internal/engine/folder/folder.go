// Package folder keeps the files by which a sandbox that outlives its maker is found
// again:
//
//	control       the socket of the process that runs it
//	from/         the snapshot that it comes from, in hard links: the sandbox
//	              does not need the original
//	process.json  written last: which process it is
package folder

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"agentrun.dev/internal/durable"
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/host/procid"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
)

// Folder is the path of such a folder. If it is empty, there is no folder.
type Folder string

// Record is the content of process.json.
type Record struct {
	Process procid.ID `json:"process"`
	// BootID is the id of the host's boot, since process ids are valid until the host
	// restarts.
	BootID   string `json:"boot_id"`
	Hostname string `json:"hostname"`
	// Generation is the sandbox's generation, or higher.
	Generation uint64 `json:"generation"`
	// Based says that memory and disks consist of the snapshot and the writes since.
	// Otherwise there are layers in between that only the process has.
	Based bool `json:"based"`
	// Protocol is the version of its control protocol that the process speaks
	// (vmmctl.Protocol, gvisorctl.Protocol). It is 0 if an AgentRun before this field
	// has written the record; Speaks then derives the version.
	Protocol int `json:"protocol,omitempty"`
	// Streams and Wires are the fields that an AgentRun before Protocol writes, and
	// reads if this machine goes back to it. Streams says that the process can write
	// its sandbox to pipes. Wires says that it hands its wire to an adopter.
	Streams bool `json:"streams"`
	Wires   bool `json:"wires"`
}

// The versions, of both control protocols, that Streams and Wires stand for.
const (
	sinceStream = 2
	sinceWire   = 3
)

// Speaks returns the version of its control protocol that the process speaks.
func (r Record) Speaks() int {
	switch {
	case r.Protocol > 0:
		return r.Protocol
	case r.Wires:
		return sinceWire
	case r.Streams:
		return sinceStream
	}
	return 1
}

// Control is the path of the control socket.
func (f Folder) Control() string { return filepath.Join(string(f), "control") }

// From is the path of the snapshot.
func (f Folder) From() string { return filepath.Join(string(f), "from") }

func (f Folder) record() string { return filepath.Join(string(f), "process.json") }

// Prepare makes the folder ready before a fork of parent is started. It returns the
// fork's own copy of parent.
func (f Folder) Prepare(parent *snapshot.Snapshot) (*snapshot.Snapshot, error) {
	if parent == nil {
		return nil, errors.New("a fork of a sandbox that was booted cannot outlive this process: snapshot it first, and fork the snapshot")
	}
	return parent.Clone(f.From())
}

// Write records the process of the sandbox.
func (f Folder) Write(pid int, r Record) (err error) {
	if r.Process, err = procid.Of(pid); err != nil {
		return err
	}
	if r.BootID, err = BootID(); err != nil {
		return err
	}
	r.Streams, r.Wires = r.Speaks() >= sinceStream, r.Speaks() >= sinceWire
	return f.replace(r)
}

func (f Folder) replace(r Record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	// A crash of the host ends the sandbox, so the record need not be durable.
	if err := durable.ReplaceVolatile(f.record(), append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("write down the sandbox's process: %w", err)
	}
	return nil
}

func (f Folder) read() (r Record, err error) {
	b, err := os.ReadFile(f.record())
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w, or never began: %w", engine.ErrEnded, err)
	}
	if err != nil {
		return r, fmt.Errorf("read which process the sandbox is: %w", err)
	}
	if err := json.Unmarshal(b, &r); err != nil {
		// The file is replaced in one step. So only a power cut damages it, and that
		// has ended the sandbox.
		return r, fmt.Errorf("%w: %s is damaged: %w", engine.ErrEnded, f.record(), err)
	}
	return r, nil
}

// Change changes the record. Without a folder it does nothing. It is called before
// the change that it records takes effect.
func (f Folder) Change(do func(*Record)) error {
	if f == "" {
		return nil
	}
	r, err := f.read()
	if err != nil {
		return err
	}
	old := r
	if do(&r); r == old {
		return nil
	}
	return f.replace(r)
}

// Read returns the record of a sandbox that may still run. If the record is from an
// earlier boot of the host, the error is engine.ErrEnded.
func (f Folder) Read() (Record, error) {
	r, err := f.read()
	if err != nil {
		return r, err
	}
	boot, err := BootID()
	if err == nil && r.BootID != boot {
		err = fmt.Errorf("%w when this machine restarted", engine.ErrEnded)
	}
	return r, err
}

// Process returns the process of a running sandbox. If the process is gone, the error
// is engine.ErrEnded.
func (f Folder) Process() (pid int, err error) {
	r, err := f.Read()
	if err == nil && !r.Process.Alive() {
		err = fmt.Errorf("%w: its process is gone", engine.ErrEnded)
	}
	return r.Process.PID, err
}

// Remove ends the machine of the folder and deletes the folder. stop ends a process
// of which only the socket is known; if no process listens there, that is no error.
func (f Folder) Remove(ctx context.Context, stop func(ctx context.Context, socket string) error) error {
	r, err := f.Read()
	if err == nil {
		err = r.Process.Kill(ctx)
	} else {
		// No record exists, but a process may have been started.
		err = stop(ctx, f.Control())
	}
	if err == nil {
		err = os.RemoveAll(string(f))
	}
	if err != nil {
		return fmt.Errorf("remove the sandbox in %s: %w", f, err)
	}
	return nil
}

// Layers are the layers that the sandboxes in these folders and these snapshots use.
func Layers(folders, snapshots []string) map[layer.Digest]bool {
	used := map[layer.Digest]bool{}
	for _, f := range folders {
		snapshots = append(snapshots, Folder(f).From())
	}
	for _, dir := range snapshots {
		m, err := snapshot.ReadManifest(dir)
		if err != nil {
			continue // the folder is being made or removed
		}
		for _, ref := range m.Layers() {
			used[ref.Digest] = true
		}
	}
	return used
}

// BootID identifies the host's boot.
func BootID() (string, error) { return procid.BootID() }
