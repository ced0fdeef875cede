package peers

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

//go:embed driver.py
var driverSource string

// imageName is microsandbox's name of the root filesystem.
const imageName = "agentrun/bench:1"

// microsandbox is driven through its Python package.
type microsandbox struct {
	cfg    Config
	driver *driver
	home   *home
}

func (m *microsandbox) open(ctx context.Context) (err error) {
	if m.cfg.Python == "" {
		return errors.New("--python names no interpreter that has it: make bench-peers installs it into the cache")
	}
	if m.cfg.RootDir == "" {
		return errors.New("its image is made of a folder, and --rootfs is none")
	}
	archive := filepath.Join(m.cfg.Folder, "image.tar")
	if err := writeArchive(m.cfg.RootDir, imageName, archive); err != nil {
		return err
	}
	if m.home, err = newHome(ctx); err != nil {
		return err
	}
	if m.driver, err = startDriver(m.cfg.Python, "MSB_HOME="+filepath.Join(m.home.dir, "h")); err != nil {
		return err
	}
	return m.driver.call(ctx, request{
		Op: "load", Archive: archive, MemoryMiB: m.cfg.Memory >> 20, CPUs: m.cfg.VCPUs, Program: m.cfg.Program,
	}, nil)
}

func (m *microsandbox) boot(ctx context.Context) (time.Duration, error) {
	var a forkAnswer
	err := m.driver.call(ctx, request{Op: "boot"}, &a)
	return ms(a.Answered), err
}

func (m *microsandbox) ping(ctx context.Context) (time.Duration, error) { return m.simple(ctx, "ping") }
func (m *microsandbox) exec(ctx context.Context) (time.Duration, error) { return m.simple(ctx, "exec") }

func (m *microsandbox) freeze(ctx context.Context) error {
	_, err := m.simple(ctx, "freeze")
	return err
}

func (m *microsandbox) simple(ctx context.Context, op string) (time.Duration, error) {
	var a struct {
		MS float64 `json:"ms"`
	}
	err := m.driver.call(ctx, request{Op: op}, &a)
	return ms(a.MS), err
}

func (m *microsandbox) fork(ctx context.Context) (forks []forked, err error) {
	for _, op := range []string{"fork", "restore"} {
		var a forkAnswer
		if err := m.driver.call(ctx, request{Op: op}, &a); err != nil {
			return nil, fmt.Errorf("%s: %w", op, err)
		}
		forks = append(forks, forked{
			running: ms(a.Returned), answered: ms(a.Answered), executed: ms(a.Executed),
			ownAfterAnswer: a.OwnAfterAnswer << 10, ownAfterExec: a.OwnAfterExec << 10,
		})
	}
	return forks, nil
}

func (m *microsandbox) live(ctx context.Context) (lived, error) {
	var a struct {
		Silence float64 `json:"silence_ms"`
	}
	err := m.driver.call(ctx, request{Op: "live", Dirty: passScript(m.cfg.Dirty)}, &a)
	return lived{silence: ms(a.Silence)}, err
}

func (m *microsandbox) close() error {
	var errs []error
	if m.driver != nil {
		errs = append(errs, m.driver.close())
	}
	if m.home != nil {
		errs = append(errs, m.home.close())
	}
	return errors.Join(errs...)
}

// request is a line to the driver. driver.py describes the operations.
type request struct {
	Op        string `json:"op"`
	Archive   string `json:"archive,omitempty"`
	MemoryMiB uint64 `json:"memory_mib,omitempty"`
	CPUs      int    `json:"cpus,omitempty"`
	Program   string `json:"program,omitempty"`
	Dirty     string `json:"dirty,omitempty"`
}

// forkAnswer is the driver's answer to boot, fork and restore.
type forkAnswer struct {
	Returned       float64 `json:"returned_ms"`
	Answered       float64 `json:"answered_ms"`
	Executed       float64 `json:"executed_ms"`
	OwnAfterAnswer uint64  `json:"own_after_answer_kib"`
	OwnAfterExec   uint64  `json:"own_after_exec_kib"`
}

func ms(x float64) time.Duration { return time.Duration(x * float64(time.Millisecond)) }

// driver is a running driver.py.
type driver struct {
	cmd     *exec.Cmd
	stdin   io.WriteCloser
	answers *bufio.Reader
	said    *bytes.Buffer // its stderr; complete once it has ended
}

func startDriver(python string, env ...string) (*driver, error) {
	d := &driver{cmd: exec.Command(python, "-c", driverSource), said: &bytes.Buffer{}}
	d.cmd.Env = append(os.Environ(), env...)
	d.cmd.Stderr = d.said
	stdin, err := d.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := d.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	d.stdin, d.answers = stdin, bufio.NewReader(stdout)
	if err := d.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the driver: %w", err)
	}
	return d, nil
}

// call sends a request and decodes the answer's result. A driver that does not
// answer in time is killed.
func (d *driver) call(ctx context.Context, r request, result any) error {
	stop := context.AfterFunc(ctx, func() { _ = d.cmd.Process.Kill() }) // it may be gone
	defer stop()
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if _, err := d.stdin.Write(append(line, '\n')); err != nil {
		return d.ended(ctx, err)
	}
	answer, err := d.answers.ReadBytes('\n')
	if err != nil {
		return d.ended(ctx, err)
	}
	return parseAnswer(answer, result)
}

// ended says why a driver does not answer.
func (d *driver) ended(ctx context.Context, err error) error {
	_ = d.stdin.Close() // it may be gone
	if waitErr := d.cmd.Wait(); waitErr != nil {
		err = waitErr
	}
	err = errors.Join(context.Cause(ctx), err)
	return fmt.Errorf("the driver ended: %w: %s", err, strings.TrimSpace(d.said.String()))
}

// parseAnswer decodes a line of the driver.
func parseAnswer(line []byte, result any) error {
	var a struct {
		Result json.RawMessage `json:"result"`
		Error  string          `json:"error"`
	}
	if err := json.Unmarshal(line, &a); err != nil {
		return fmt.Errorf("the driver said %q: %w", line, err)
	}
	switch {
	case a.Error != "":
		return errors.New(a.Error)
	case a.Result == nil:
		return fmt.Errorf("the driver said %q, which is neither a result nor an error", line)
	case result == nil:
		return nil
	}
	if err := json.Unmarshal(a.Result, result); err != nil {
		return fmt.Errorf("the driver said %q: %w", line, err)
	}
	return nil
}

func (d *driver) close() error {
	if d.cmd.ProcessState != nil {
		return nil // it has ended, which was reported already
	}
	ctx, cancel := context.WithTimeout(context.Background(), stepLimit)
	defer cancel()
	err := d.call(ctx, request{Op: "stop"}, nil)
	if d.cmd.ProcessState != nil {
		return err
	}
	return errors.Join(err, d.stdin.Close(), d.cmd.Wait())
}

// home is a folder for microsandbox. microsandbox keeps owners and modes of a guest's
// files in extended attributes, which tmpfs supports since Linux 6.6. On older
// kernels the folder gets a file system of its own, in memory.
type home struct {
	dir   string
	image string // mounted on dir; empty if dir supports the attributes
}

// homeSize bounds the storage of microsandbox. Unwritten pages cost nothing.
const homeSize = 6 << 30

func newHome(ctx context.Context) (_ *home, err error) {
	// The path is short because microsandbox makes sockets there.
	dir, err := os.MkdirTemp("/run", "msb-")
	if err != nil {
		return nil, fmt.Errorf("make a folder for microsandbox: %w (it needs root)", err)
	}
	h := &home{dir: dir}
	err = unix.Setxattr(dir, "user.agentrun", []byte("test"), 0)
	if err == nil {
		return h, nil
	}
	if !errors.Is(err, unix.ENOTSUP) {
		return nil, errors.Join(fmt.Errorf("set an attribute of %s: %w", dir, err), os.Remove(dir))
	}
	if err := h.mount(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("make a file system with attributes for microsandbox: %w", err), h.close())
	}
	return h, nil
}

func (h *home) mount(ctx context.Context) error {
	f, err := os.CreateTemp("/dev/shm", "msb-*.ext4")
	if err != nil {
		return err
	}
	image := f.Name()
	if err := errors.Join(f.Truncate(homeSize), f.Close()); err != nil {
		return errors.Join(err, os.Remove(image))
	}
	// If the modules are built in, modprobe succeeds as well.
	for _, command := range [][]string{
		{"modprobe", "-a", "loop", "ext4"},
		{"mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-E", "nodiscard,lazy_itable_init=1", image},
		{"mount", "-o", "loop,noatime", image, h.dir},
	} {
		out, err := exec.CommandContext(ctx, command[0], command[1:]...).CombinedOutput()
		if err != nil {
			return errors.Join(fmt.Errorf("%s: %w: %s", strings.Join(command, " "), err, bytes.TrimSpace(out)), os.Remove(image))
		}
	}
	h.image = image
	return nil
}

func (h *home) close() error {
	if h.image == "" {
		return os.RemoveAll(h.dir)
	}
	// Killed sandboxes keep the mount busy until they have ended.
	err := unix.Unmount(h.dir, unix.MNT_DETACH)
	return errors.Join(err, os.Remove(h.image), os.Remove(h.dir))
}
