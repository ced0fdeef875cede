package debian

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Build makes the root filesystem in an empty folder. work is an empty folder
// outside of it, whose contents are of no use afterwards.
func (r Recipe) Build(ctx context.Context, root, work string, o Options) error {
	if err := r.Validate(); err != nil {
		return err
	}
	if err := programs(); err != nil {
		return err
	}
	start := time.Now()
	if err := r.bootstrap(ctx, root, o.Sources, o.Log); err != nil {
		return err
	}
	in := &chroot{root: root, work: work, log: o.Log}
	if len(r.Pip) > 0 {
		if o.Pip != nil {
			o.Pip()
		}
		if err := r.installWheels(ctx, in); err != nil {
			return err
		}
	}
	if err := clean(root, o.Sources); err != nil {
		return fmt.Errorf("clean up the root filesystem: %w", err)
	}
	epoch := o.Epoch
	if epoch.IsZero() {
		var err error
		if epoch, err = newestBefore(root, start); err != nil {
			return fmt.Errorf("read times: %w", err)
		}
	}
	if err := settle(root, epoch); err != nil {
		return fmt.Errorf("set times: %w", err)
	}
	if len(r.Pip) > 0 {
		// Compiled code holds the time of its source: now, and not when it was
		// installed.
		if err := in.compile(ctx); err != nil {
			return err
		}
		if err := settle(root, epoch); err != nil {
			return fmt.Errorf("set times: %w", err)
		}
	}
	return nil
}

// slim leaves out files that are not read in a sandbox. Licences stay.
var slim = []string{
	"path-exclude=/usr/share/man/*", "path-exclude=/usr/share/info/*", "path-exclude=/usr/share/locale/*",
	"path-exclude=/usr/share/doc/*", "path-include=/usr/share/doc/*/copyright",
}

func (r Recipe) bootstrap(ctx context.Context, root string, sources []string, log io.Writer) error {
	options, err := aptOptions(ctx)
	if err != nil {
		return err
	}
	args := []string{"--mode=root", "--variant=minbase", "--format=directory", "--architectures=amd64"}
	if p := r.packages(); len(p) > 0 {
		args = append(args, "--include="+strings.Join(p, ","))
	}
	for _, o := range options {
		args = append(args, "--aptopt="+o)
	}
	for _, o := range slim {
		args = append(args, "--dpkgopt="+o)
	}
	args = append(append(args, r.Suite, root), sources...)
	// The result must not depend on the settings of the user who builds it.
	env := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive", "TMPDIR=/tmp"}
	if _, err := runApart(ctx, log, env, append([]string{"mmdebstrap"}, args...)...); err != nil {
		return fmt.Errorf("install Debian packages: %w", err)
	}
	return nil
}

// runApart runs a command with mounts and processes of its own. Processes that
// it leaves end with it, and it ends with us. It returns the output of the
// command.
func runApart(ctx context.Context, log io.Writer, env []string, argv ...string) ([]byte, error) {
	apart := []string{"--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"}
	cmd := exec.CommandContext(ctx, "unshare", append(apart, argv...)...) //nolint:gosec // no shell takes them apart
	cmd.Env = env
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var said tail
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, io.Writer(&said)
	if log != nil {
		cmd.Stdout, cmd.Stderr = io.MultiWriter(&out, log), io.MultiWriter(&said, log)
	}
	done := make(chan error, 1)
	go func() {
		// The parent-death signal comes when the thread ends: the thread is
		// kept for the command, and ends with this goroutine.
		runtime.LockOSThread()
		done <- cmd.Run()
	}()
	if err := <-done; err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, fmt.Errorf("%s: %w: %s", argv[0], err, said.lines())
	}
	return out.Bytes(), nil
}

// tail keeps the end of a program's output, which is where it says why it
// failed.
type tail struct{ b []byte }

const tailSize = 2 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.b = append(t.b, p...)
	if len(t.b) > 2*tailSize {
		t.b = append(t.b[:0], t.b[len(t.b)-tailSize:]...)
	}
	return len(p), nil
}

// credentials in URLs must not appear in errors.
var urlCredentials = regexp.MustCompile(`://[^/@\s]+@`)

func (t *tail) lines() string {
	return urlCredentials.ReplaceAllString(strings.TrimSpace(string(t.b)), "://")
}

// clean removes traces of this host and of the time of the build.
func clean(root string, sources []string) error {
	inside, err := os.OpenRoot(root)
	if err != nil {
		return err
	}
	defer inside.Close()
	for _, pattern := range []string{
		"etc/apt/apt.conf.d/99mmdebstrap", "etc/resolv.conf", "etc/hostname", "etc/mailname", "var/lib/dbus/machine-id",
		"root/.cache", "var/log/*.log", "var/log/apt/*", "var/lib/apt/lists/*", "var/cache/apt/*", "var/cache/ldconfig/*",
		"var/cache/debconf/*-old", "var/lib/dpkg/*-old", "tmp/*", "run/*", "etc/.pwd.lock", "etc/*-",
	} {
		matches, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return err
		}
		for _, m := range matches {
			name, err := filepath.Rel(root, m)
			if err != nil {
				return err
			}
			if err := inside.RemoveAll(name); err != nil {
				return err
			}
		}
	}
	var lines []string
	for _, s := range sources {
		lines = append(lines, withoutCredentials(s))
	}
	files := map[string]string{
		"etc/apt/sources.list": strings.Join(lines, "\n") + "\n",
		"etc/hostname":         "localhost\n",
		"etc/machine-id":       "", // each sandbox gets its own
		"etc/resolv.conf":      "",
	}
	for name, content := range files {
		if err := inside.RemoveAll(name); err != nil {
			return err
		}
		if err := inside.WriteFile(name, []byte(content), 0o644); err != nil {
			return err
		}
	}
	return pipSettings(inside)
}

// pipSettings let pip install into the image's own Python, which Debian
// otherwise reserves for its packages (PEP 668): the image is the environment.
func pipSettings(inside *os.Root) error {
	if _, err := inside.Stat("usr/lib/python3/dist-packages/pip"); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	const settings = "[global]\nbreak-system-packages = true\nroot-user-action = ignore\n"
	return inside.WriteFile("etc/pip.conf", []byte(settings), 0o644)
}

// days is the day on which a password was changed last, in /etc/shadow.
var days = regexp.MustCompile(`(?m)^([^:\n]*:[^:\n]*:)[0-9]+:`)

// settle sets times that would show when the image was built.
func settle(root string, epoch time.Time) error {
	inside, err := os.OpenRoot(root)
	if err != nil {
		return err
	}
	defer inside.Close()
	shadow, err := inside.ReadFile("etc/shadow")
	if err == nil {
		day := strconv.FormatInt(epoch.Unix()/86400, 10)
		f, err := inside.OpenFile("etc/shadow", os.O_WRONLY|os.O_TRUNC, 0)
		if err != nil {
			return err
		}
		_, err = f.Write(days.ReplaceAll(shadow, []byte("${1}"+day+":")))
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return clampTimes(root, epoch)
}
