package peers

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"agentrun.dev/internal/engine/microvm"
	"agentrun.dev/internal/guest/guestrpc"
	"agentrun.dev/internal/host/assets"
	"golang.org/x/sys/unix"
)

// firecracker runs our kernel, root filesystem and agent in Firecracker, through its
// HTTP interface and its vsock device.
type firecracker struct {
	cfg    Config
	memory string // on tmpfs: snapshots are mapped from here

	kernel, initrd string
	source         *fcProcess
	count          int
}

// Names in the folder of each process. The socket's path is relative, because
// snapshots contain it and every process needs a socket of its own.
const (
	fcAPI   = "api.socket"
	fcVsock = "vsock.socket"
	// fcCmdline is the command line of our guests without the parts that only our VMM
	// needs.
	fcCmdline = "console=ttyS0 quiet panic=-1 reboot=k pci=off sysctl.kernel.modules_disabled=1 agentrun.root=/dev/vda"
)

func (f *firecracker) open(ctx context.Context) (err error) {
	if f.cfg.Firecracker == "" {
		return errors.New("--firecracker names no binary")
	}
	out, err := exec.CommandContext(ctx, f.cfg.Firecracker, "--version").CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s --version: %w: %s", f.cfg.Firecracker, err, bytes.TrimSpace(out))
	}
	if f.kernel, err = assets.Path(assets.Kernel); err != nil {
		return err
	}
	agent, err := assets.Open(assets.GuestAgent)
	if err != nil {
		return err
	}
	defer func() { _ = agent.Close() }() // only read
	initrd, err := microvm.Initramfs(agent)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, initrd.Close()) }()
	f.initrd = filepath.Join(f.cfg.Folder, "initrd")
	copied, err := os.Create(f.initrd)
	if err != nil {
		return err
	}
	_, err = io.Copy(copied, io.NewSectionReader(initrd, 0, 1<<40))
	return errors.Join(err, copied.Close())
}

// fcProcess is a Firecracker process with, once it has answered, an agent.
type fcProcess struct {
	cmd    *exec.Cmd
	dir    string
	said   *bytes.Buffer // complete when done is closed
	done   chan struct{}
	client *http.Client
	agent  *guestrpc.Client
}

// start starts a process and waits until its interface listens.
func (f *firecracker) start(ctx context.Context) (_ *fcProcess, err error) {
	f.count++
	p := &fcProcess{dir: filepath.Join(f.memory, fmt.Sprintf("fc%d", f.count)), said: &bytes.Buffer{}, done: make(chan struct{})}
	if err := os.Mkdir(p.dir, 0o700); err != nil {
		return nil, err
	}
	api := filepath.Join(p.dir, fcAPI)
	p.client = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		for {
			conn, err := (&net.Dialer{}).DialContext(ctx, "unix", api)
			if !errors.Is(err, unix.ECONNREFUSED) || p.ended() {
				return conn, err
			}
			runtime.Gosched() // it is bound, and about to listen
		}
	}}}
	p.cmd = exec.Command(f.cfg.Firecracker, "--api-sock", fcAPI)
	p.cmd.Dir = p.dir
	p.cmd.Stdout, p.cmd.Stderr = p.said, p.said
	ready, err := watchFor(p.dir, fcAPI)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, ready.close()) }()
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start Firecracker: %w", err)
	}
	go func() {
		_ = p.cmd.Wait() // its output says how it ended
		close(p.done)
	}()
	if err := ready.wait(ctx, p.done); err != nil {
		return nil, errors.Join(err, p.end(), errors.New(strings.TrimSpace(p.said.String())))
	}
	return p, nil
}

func (p *fcProcess) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

func (p *fcProcess) end() error {
	var err error
	if p.agent != nil {
		_ = p.agent.Close() // it may be reset already
	}
	p.client.CloseIdleConnections()
	if killErr := p.cmd.Process.Kill(); killErr != nil && !errors.Is(killErr, os.ErrProcessDone) {
		err = killErr
	}
	<-p.done
	return errors.Join(err, os.RemoveAll(p.dir))
}

// call makes one request to Firecracker's interface.
func (p *fcProcess) call(ctx context.Context, method, path string, body any) error {
	encoded, err := json.Marshal(body)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://localhost"+path, bytes.NewReader(encoded))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := p.client.Do(req)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	answer, err := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, fault(answer))
	}
	return nil
}

// fault returns the message of a refusal.
func fault(answer []byte) string {
	var f struct {
		Message string `json:"fault_message"`
	}
	if json.Unmarshal(answer, &f) == nil && f.Message != "" {
		return f.Message
	}
	return strings.TrimSpace(string(answer))
}

type object = map[string]any

func (f *firecracker) boot(ctx context.Context) (_ time.Duration, err error) {
	if f.source != nil {
		if err := f.source.end(); err != nil {
			return 0, err
		}
	}
	begin := time.Now()
	p, err := f.start(ctx)
	if err != nil {
		return 0, err
	}
	f.source = p
	// The agent connects to this port once it listens.
	l, err := net.Listen("unix", filepath.Join(p.dir, fmt.Sprintf("%s_%d", fcVsock, guestrpc.AgentPort)))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	for _, c := range []struct {
		path string
		body object
	}{
		{"/boot-source", object{"kernel_image_path": f.kernel, "initrd_path": f.initrd, "boot_args": fcCmdline}},
		{"/machine-config", object{"vcpu_count": f.cfg.VCPUs, "mem_size_mib": f.cfg.Memory >> 20, "track_dirty_pages": true}},
		{"/drives/root", object{"drive_id": "root", "path_on_host": f.cfg.Root, "is_root_device": false, "is_read_only": true}},
		{"/vsock", object{"guest_cid": 3, "uds_path": fcVsock}},
		{"/actions", object{"action_type": "InstanceStart"}},
	} {
		if err := p.call(ctx, http.MethodPut, c.path, c.body); err != nil {
			return 0, err
		}
	}
	ready, err := l.Accept()
	if err != nil {
		return 0, fmt.Errorf("wait for the guest's agent: %w", err)
	}
	if err := ready.Close(); err != nil {
		return 0, err
	}
	if err := p.dial(ctx); err != nil {
		return 0, err
	}
	return time.Since(begin), nil
}

// dial opens the session with the agent, whose hello is its first answer.
func (p *fcProcess) dial(ctx context.Context) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(p.dir, fcVsock))
	if err != nil {
		return err
	}
	if err := connectVsock(conn, guestrpc.AgentPort); err != nil {
		return errors.Join(err, conn.Close())
	}
	p.agent, err = guestrpc.NewClient(ctx, conn)
	return err
}

// connectVsock asks Firecracker for a port of its guest.
func connectVsock(conn io.ReadWriter, port uint32) error {
	if _, err := fmt.Fprintf(conn, "CONNECT %d\n", port); err != nil {
		return fmt.Errorf("connect to guest port %d: %w", port, err)
	}
	// The line is read byte by byte, because the bytes after it come from the guest.
	line, err := bufio.NewReaderSize(oneByte{conn}, 16).ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "OK ") {
		return fmt.Errorf("connect to guest port %d: Firecracker said %q, %w", port, line, errors.Join(err, errRefused))
	}
	return nil
}

var errRefused = errors.New("not OK")

type oneByte struct{ r io.Reader }

func (o oneByte) Read(p []byte) (int, error) { return o.r.Read(p[:1]) }

func (f *firecracker) ping(ctx context.Context) (time.Duration, error) {
	return timed(time.Now(), func() error { return f.source.agent.Ping(ctx) })
}

func (f *firecracker) exec(ctx context.Context) (time.Duration, error) {
	return timed(time.Now(), func() error { return runProgram(ctx, f.source.agent, f.cfg.Program) })
}

func (f *firecracker) file(name string) string { return filepath.Join(f.memory, name) }

// save takes a snapshot while the source stands still, and returns for how long it
// did. It resets the source's vsock connections.
func (f *firecracker) save(ctx context.Context, kind, name string) (time.Duration, error) {
	p := f.source
	paused, err := timed(time.Now(), func() error {
		if err := p.call(ctx, http.MethodPatch, "/vm", object{"state": "Paused"}); err != nil {
			return err
		}
		err := p.call(ctx, http.MethodPut, "/snapshot/create", object{
			"snapshot_type": kind, "snapshot_path": f.file(name + ".state"), "mem_file_path": f.file(name + ".memory"),
		})
		return errors.Join(err, p.call(ctx, http.MethodPatch, "/vm", object{"state": "Resumed"}))
	})
	if err != nil {
		return 0, err
	}
	_ = p.agent.Close()
	return paused, p.dial(ctx)
}

func (f *firecracker) freeze(ctx context.Context) error {
	_, err := f.save(ctx, "Full", "base")
	return err
}

// fork loads the snapshot into a new process. The same fork gives the times from the
// start of the process, and from the time when the process was waiting.
func (f *firecracker) fork(ctx context.Context) (_ []forked, err error) {
	begin := time.Now()
	p, err := f.start(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.end()) }()
	started := time.Since(begin)
	err = p.call(ctx, http.MethodPut, "/snapshot/load", object{
		"snapshot_path": f.file("base.state"), "resume_vm": true,
		"mem_backend": object{"backend_type": "File", "backend_path": f.file("base.memory")},
	})
	if err != nil {
		return nil, err
	}
	whole := forked{running: time.Since(begin)}
	if err := p.dial(ctx); err != nil {
		return nil, err
	}
	whole.answered = time.Since(begin)
	// A fork of AgentRun has done this before it is handed out.
	if _, err := p.agent.Renew(ctx, guestrpc.RenewRequest{
		Entropy: make([]byte, 64), WallClock: time.Now(), Hostname: "fork", MachineID: strings.Repeat("0a", 16), Generation: 1,
	}); err != nil {
		return nil, err
	}
	whole.renewed = time.Since(begin)
	if whole, err = whole.use(ctx, p.agent, p.cmd.Process.Pid, f.cfg.Program); err != nil {
		return nil, err
	}
	waiting := whole
	waiting.running -= started
	waiting.answered -= started
	waiting.renewed -= started
	waiting.executed -= started
	return []forked{waiting, whole}, nil
}

// live is pause, diff snapshot and resume. Firecracker has no cheaper fork of a
// running machine.
func (f *firecracker) live(ctx context.Context) (l lived, err error) {
	if l.pass, err = passes(ctx, f.source.agent, f.cfg.Dirty); err != nil {
		return l, err
	}
	defer func() { _ = os.Remove(f.file("diff.memory")) }() // the next live fork writes it again
	if l.pause, err = f.save(ctx, "Diff", "diff"); err != nil {
		return l, err
	}
	l.silence = l.pause // it cannot be shorter, and its connections end
	l.next, err = pass(ctx, f.source.agent, f.cfg.Dirty)
	return l, err
}

func (f *firecracker) close() error {
	if f.source == nil {
		return nil
	}
	return f.source.end()
}
