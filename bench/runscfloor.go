package bench

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/host/assets"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// sampler measures a floor.
type sampler interface {
	Sample() (time.Duration, error)
	Close() error
}

// floorOf is the floor of an engine. For microVMs it is the time that KVM takes for
// any machine. For gVisor it is the time that runsc takes, through its command line,
// to restore a shell that answers, beside the programs that warm has left running.
func floorOf(kind pick.Kind, root, warm string) (sampler, error) {
	if kind == pick.GVisor {
		return newRunscFloor(root, warm)
	}
	return NewFloor()
}

// runscFloor restores the checkpoint of a shell with a plain runsc, through its
// command line and, except for compression, with its defaults. It uses the runsc in
// gvisor-helper, as go install builds it. The helper's own optimisations apply only
// to its own sandboxes.
type runscFloor struct {
	runsc, dir string
	count      int
}

// echo answers each line.
const echo = "while read line; do echo $line; done"

func newRunscFloor(root, warm string) (_ *runscFloor, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("prepare the floor: %w", err)
		}
	}()
	f := &runscFloor{}
	if f.runsc, err = assets.Path(assets.GVisorHelper); err != nil {
		return nil, err
	}
	if root, err = filepath.Abs(root); err != nil {
		return nil, err
	}
	if f.dir, err = os.MkdirTemp("/dev/shm", "agentrun-floor-"); err != nil {
		return nil, err
	}
	spec, err := json.Marshal(&specs.Spec{
		Version: "1.0.0", Root: &specs.Root{Path: filepath.Join(f.dir, "root")},
		Process: &specs.Process{Args: []string{"sh", "-c", warm + "\n" + echo}, Cwd: "/", Env: []string{"PATH=/usr/bin:/bin"}},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"}, {Destination: "/dev", Type: "tmpfs", Source: "tmpfs"},
			{Destination: "/run", Type: "tmpfs", Source: "tmpfs"},
		},
		Linux: &specs.Linux{},
		Annotations: map[string]string{
			"dev.gvisor.spec.rootfs.source": root, "dev.gvisor.spec.rootfs.type": "erofs", "dev.gvisor.spec.rootfs.overlay": "memory",
		},
	})
	if err == nil {
		err = errors.Join(os.WriteFile(filepath.Join(f.dir, "config.json"), spec, 0o600), os.Mkdir(filepath.Join(f.dir, "root"), 0o700))
	}
	if err == nil {
		err = f.freeze()
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// freeze starts the shell once and makes the checkpoint.
func (f *runscFloor) freeze() error {
	image := filepath.Join(f.dir, "image")
	if err := os.Mkdir(image, 0o700); err != nil {
		return err
	}
	_, end, err := f.ask("run", "-bundle="+f.dir)
	if err != nil {
		return err
	}
	said, err := f.command("checkpoint", "-image-path="+image, "-compression=none", f.id()).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("checkpoint: %w: %s", err, said)
	}
	return errors.Join(err, end())
}

func (f *runscFloor) id() string { return fmt.Sprintf("floor-%016d", f.count) }

func (f *runscFloor) command(args ...string) *exec.Cmd {
	return exec.Command(f.runsc, append([]string{
		"--root=" + filepath.Join(f.dir, "state"), "--platform=systrap", "--network=none", "--ignore-cgroups", "--host-settings=ignore",
	}, args...)...)
}

// ask starts a sandbox and returns how long it took until its shell had answered.
func (f *runscFloor) ask(args ...string) (took time.Duration, end func() error, err error) {
	f.count++
	cmd := f.command(append(args, f.id())...)
	in, err := cmd.StdinPipe()
	if err != nil {
		return 0, nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, nil, err
	}
	begin := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, nil, err
	}
	id := f.id()
	end = func() error {
		_ = in.Close() // the shell ends with its input
		_ = f.command("delete", "-force", id).Run()
		_ = cmd.Wait() // it was killed
		return nil
	}
	want := "answer " + strconv.Itoa(f.count)
	if _, err := io.WriteString(in, want+"\n"); err != nil {
		return 0, nil, errors.Join(err, end())
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if lines.Text() == want {
			return time.Since(begin), end, nil
		}
	}
	return 0, nil, errors.Join(fmt.Errorf("runsc %s: the shell did not answer", args[0]), lines.Err(), end())
}

// Sample restores the shell.
func (f *runscFloor) Sample() (time.Duration, error) {
	took, end, err := f.ask("restore", "-bundle="+f.dir, "-image-path="+filepath.Join(f.dir, "image"))
	if err != nil {
		return 0, err
	}
	return took, end()
}

// Close removes the floor's folder.
func (f *runscFloor) Close() error { return os.RemoveAll(f.dir) }
