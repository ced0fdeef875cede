package forkd

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/folder"
	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/host/procid"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/snapshot"
)

// settles waits until the daemon has exactly the things that its records name:
// interrupted operations are undone, pools are full with the present revision, and
// templates are built.
func (n *node) settles() {
	n.t.Helper()
	for begin := time.Now(); ; time.Sleep(100 * time.Millisecond) { // there is no event for all of this
		err := n.unsettled()
		if err == nil {
			return
		}
		if time.Since(begin) > 2*time.Minute {
			n.t.Fatalf("after a kill the daemon never came to rest:\n%v\n%s", err, n.Log)
		}
	}
}

// unsettled returns an error that lists missing and surplus things.
func (n *node) unsettled() error {
	ctx := n.t.Context()
	pools, err := n.Client.Pools(ctx)
	if err != nil {
		return err
	}
	waiting := 0
	for _, p := range pools {
		waiting += p.Ready
		if p.Phase != rest.PhaseReady || p.Ready != p.Spec.Replicas || p.Snapshots != p.Ready || p.Problem != "" {
			return fmt.Errorf("pool %s is %s: %d of %d are ready, %d of the present revision: %s", p.Name, p.Phase, p.Ready, p.Spec.Replicas, p.Snapshots, p.Problem)
		}
	}
	templates, err := n.Client.Templates(ctx)
	if err != nil {
		return err
	}
	for _, t := range templates {
		if t.Phase != rest.PhaseReady {
			return fmt.Errorf("template %s is %s: %s", t.Name, t.Phase, t.Problem)
		}
	}
	sandboxes, err := n.Client.Sandboxes(ctx, false)
	if err != nil {
		return err
	}
	machines, err := n.machines()
	if err != nil {
		return err
	}
	return errors.Join(
		checkSandboxes(sandboxes, machines, waiting),
		n.count("images", count(sandboxes, rest.SandboxStateHibernated)),
		n.count("snapshots", len(templates)), n.count("logs", len(templates)), n.count("checkpoints", 0),
		n.strayProcesses(machines), n.strayLayers(), n.checkReserved(len(machines)),
	)
}

// machines returns the records of all machine folders, by folder.
func (n *node) machines() (map[string]folder.Record, error) {
	dirs, err := n.entries("machines")
	found := map[string]folder.Record{}
	for _, dir := range dirs {
		f := folder.Folder(dir)
		if _, err := f.Process(); err != nil {
			return nil, fmt.Errorf("machine %s: %w", dir, err)
		}
		if found[filepath.Base(dir)], err = f.Read(); err != nil {
			return nil, fmt.Errorf("machine %s: %w", dir, err)
		}
	}
	return found, err
}

// entries lists the paths in a folder of the state, including hidden ones.
func (n *node) entries(name string) (paths []string, err error) {
	dir := filepath.Join(n.State, "forkd", name)
	list, err := os.ReadDir(dir)
	for _, e := range list {
		paths = append(paths, filepath.Join(dir, e.Name()))
	}
	return paths, err
}

func (n *node) count(name string, want int) error {
	found, err := n.entries(name)
	if err == nil && len(found) != want {
		err = fmt.Errorf("%d %s and not %d: %q", len(found), name, want, found)
	}
	return err
}

func count(list []rest.Sandbox, state rest.SandboxState) (of int) {
	for _, s := range list {
		if s.State == state {
			of++
		}
	}
	return of
}

// checkSandboxes: each running sandbox has exactly one machine, with its host name.
// All other machines wait in pools.
func checkSandboxes(list []rest.Sandbox, machines map[string]folder.Record, waiting int) error {
	var errs []error
	named := map[string]int{}
	for _, r := range machines {
		named[r.Hostname]++
	}
	names, ids := map[string]bool{}, map[string]bool{}
	awake := 0
	for _, s := range list {
		if names[s.Name] || ids[s.Id] {
			errs = append(errs, fmt.Errorf("%s (%s) is listed twice", s.Name, s.Id))
		}
		names[s.Name], ids[s.Id] = true, true
		want := 1
		switch s.State {
		case rest.SandboxStateRunning, rest.SandboxStatePaused:
			awake++
		case rest.SandboxStateHibernated:
			want = 0
		default:
			errs = append(errs, fmt.Errorf("%s is %s", s.Name, s.State))
		}
		if s.Unresponsive != "" {
			errs = append(errs, fmt.Errorf("%s: %s", s.Name, s.Unresponsive))
		}
		if named[s.Name] != want {
			errs = append(errs, fmt.Errorf("%s is %s and has %d machines", s.Name, s.State, named[s.Name]))
		}
	}
	if len(machines) != awake+waiting {
		errs = append(errs, fmt.Errorf("%d machines for %d sandboxes and %d that wait in pools", len(machines), awake, waiting))
	}
	return errors.Join(errs...)
}

// ownProcesses returns the processes of the daemon and its sandboxes, with the parent
// of each. Their programs are in the state folder.
func (n *node) ownProcesses() (map[int]int, error) {
	all, err := filepath.Glob("/proc/[0-9]*")
	own := map[int]int{}
	for _, dir := range all {
		exe, err := os.Readlink(filepath.Join(dir, "exe"))
		if err != nil || !strings.HasPrefix(exe, n.State+"/") {
			continue // it may have ended
		}
		status, err := os.ReadFile(filepath.Join(dir, "stat"))
		if err != nil {
			continue // this one may have ended, too
		}
		// proc(5): the state and the parent follow after the name, which is in
		// parentheses.
		fields := bytes.Fields(status[bytes.LastIndexByte(status, ')')+1:])
		pid, err := strconv.Atoi(filepath.Base(dir))
		parent, err2 := strconv.Atoi(string(fields[1]))
		if err := errors.Join(err, err2); err != nil {
			return nil, err
		}
		if string(fields[0]) != "Z" {
			own[pid] = parent
		}
	}
	return own, err
}

// strayProcesses lists processes of sandboxes that belong to no machine.
func (n *node) strayProcesses(machines map[string]folder.Record) error {
	own, err := n.ownProcesses()
	if err != nil {
		return err
	}
	named := map[int]bool{}
	for _, r := range machines {
		named[r.Process.PID] = true
	}
	var stray []int
	for pid := range own {
		runs := false // a sandbox
		for at := pid; own[at] != 0 && !named[at]; at = own[at] {
			runs = runs || runsSandbox(at)
			if _, ours := own[own[at]]; !ours || own[at] == n.PID() {
				if runs {
					stray = append(stray, pid)
				}
				break
			}
		}
	}
	if len(stray) > 0 {
		return fmt.Errorf("processes %v belong to no machine", stray)
	}
	return nil
}

// runsSandbox reports whether a process is part of an engine's sandbox.
func runsSandbox(pid int) bool {
	exe, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)) // it may have ended
	base := filepath.Base(strings.TrimSuffix(exe, " (deleted)"))
	return strings.HasPrefix(base, string(assets.GVisorHelper)) || strings.HasPrefix(base, string(assets.VMM))
}

// strayLayers lists files in memory that no machine and no template needs.
func (n *node) strayLayers() error {
	machines, err := n.entries("machines")
	snapshots, err2 := n.entries("snapshots")
	if err := errors.Join(err, err2); err != nil {
		return err
	}
	used := map[string]bool{".lock": true}
	for digest := range folder.Layers(machines, snapshots) {
		used[digest.String()] = true
	}
	list, err := os.ReadDir(layer.ResidentFolder(filepath.Join(n.State, "forkd")))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	list = slices.DeleteFunc(list, func(e os.DirEntry) bool { return used[e.Name()] })
	if len(list) > 0 {
		return fmt.Errorf("in memory is what nothing needs: %v", list)
	}
	return nil
}

// checkReserved compares the memory that the node has reserved with that of the machines,
// and of the layers in memory that the machines and the pools come from.
func (n *node) checkReserved(machines int) error {
	status, err := n.Client.Node(n.t.Context())
	if err != nil {
		return err
	}
	e, closeEngine, err := openEngine(n.State)
	if err != nil {
		return err
	}
	want := uint64(machines) * e.Reserve(templateMemory, 0)
	if err := closeEngine(); err != nil {
		return err
	}
	held, err := n.held()
	if err != nil {
		return err
	}
	for bytes := range maps.Values(held) {
		want += bytes
	}
	if uint64(status.Reserved) != want {
		return fmt.Errorf("%d bytes are reserved, and %d machines with %d layers are %d", status.Reserved, machines, len(held), want)
	}
	return nil
}

// held returns the memory that machines share, each layer once. It includes that of the
// pools, because in each pool at least one machine waits.
func (n *node) held() (map[string]uint64, error) {
	machines, err := n.entries("machines")
	if err != nil {
		return nil, err
	}
	held := map[string]uint64{}
	for _, dir := range machines {
		snap, err := snapshot.Open(folder.Folder(dir).From())
		if err != nil {
			return nil, err
		}
		list, err := engine.HeldBy(snap, "")
		if err = errors.Join(err, snap.Close()); err != nil {
			return nil, err
		}
		for _, h := range list {
			held[h.ID] = h.Bytes
		}
	}
	return held, nil
}

// noteOwn adds the existing processes of sandboxes, including those that no machine
// names yet.
func (s *traces) noteOwn(n *node) {
	own, err := n.ownProcesses()
	if err != nil {
		n.t.Error(err)
	}
	for pid := range own {
		if id, err := procid.Of(pid); err == nil && runsSandbox(pid) {
			s.add(id)
		}
	}
}
