package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"agentrun.dev/testbed/internal/protocol"
	"agentrun.dev/testbed/internal/qemu"
)

// command describes a program to run inside.
type command struct {
	argv    []string
	workdir string
	tty     bool
}

// execute runs a command in the VM and returns its exit code as an exitError. It
// starts the VM if necessary.
func execute(ctx context.Context, m *qemu.VM, c command) error {
	if _, err := m.Start(ctx, qemu.Config{}); err != nil {
		return err
	}
	conn, err := m.Connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()

	start := protocol.Start{Argv: c.argv, Env: passedEnv(os.Environ()), Workdir: c.workdir, TTY: c.tty}
	if c.tty {
		if cols, rows, err := term.GetSize(0); err == nil {
			start.Rows, start.Cols = uint16(rows), uint16(cols)
		}
		if old, err := term.MakeRaw(0); err == nil {
			defer func() { _ = term.Restore(0, old) }() // fails only if the terminal is gone
		}
	}
	raw, err := json.Marshal(start)
	if err != nil {
		return err
	}
	if err := protocol.Chunks(raw, func(p []byte) error { return conn.Send(protocol.StartPart, p) }); err != nil {
		return fmt.Errorf("send the command: %w", err)
	}
	if err := conn.Send(protocol.Begin, nil); err != nil {
		return fmt.Errorf("send the command: %w", err)
	}

	stop := forwardSignals(conn, c.tty)
	defer stop()
	acks := make(chan int, 1)
	go sendStdin(conn, acks)
	return receive(m, conn, acks)
}

// passedEnv keeps the variables that mean the same inside.
func passedEnv(env []string) []string {
	exact := map[string]bool{"HOME": true, "PATH": true, "TERM": true, "CI": true, "TMPDIR": true}
	var out []string
	for _, kv := range env {
		name, _, _ := strings.Cut(kv, "=")
		if exact[name] || strings.HasPrefix(name, "AGENTRUN_") || strings.HasPrefix(name, "GO") {
			out = append(out, kv)
		}
	}
	return out
}

// receive writes the command's output until it has ended.
func receive(m *qemu.VM, conn *qemu.Conn, acks chan<- int) error {
	for {
		t, payload, err := conn.Receive()
		if errors.Is(err, io.EOF) {
			return fmt.Errorf("the machine ended while the command ran; last lines of its console:\n%s", m.ConsoleTail(20))
		} else if err != nil {
			return fmt.Errorf("receive from the machine: %w", err)
		}
		switch t {
		case protocol.Stdout:
			_, err = os.Stdout.Write(payload)
		case protocol.Stderr:
			_, err = os.Stderr.Write(payload)
		case protocol.StdinAck:
			n, parseErr := protocol.ParseUint32(payload)
			if parseErr != nil {
				return parseErr
			}
			// This never blocks for long: sendStdin receives acks whenever it waits,
			// and otherwise at most one is pending for each of its frames.
			select {
			case acks <- int(n):
			default:
				go func() { acks <- int(n) }()
			}
		case protocol.Exit:
			code, parseErr := protocol.ParseUint32(payload)
			if parseErr != nil {
				return parseErr
			}
			if code != 0 {
				return exitError(code)
			}
			return nil
		case protocol.Failed:
			return errors.New(string(payload))
		}
		if err != nil {
			// Our reader is gone (a closed pipe), so the command ends as well.
			return fmt.Errorf("write the command's output: %w", err)
		}
	}
}

// sendStdin sends stdin, never more than one window ahead of the process.
func sendStdin(conn *qemu.Conn, acks <-chan int) {
	room := protocol.Window
	buf := make([]byte, protocol.MaxPayload)
	for {
		n, err := os.Stdin.Read(buf)
		for room < n {
			room += <-acks
		}
		if n > 0 {
			room -= n
			if conn.Send(protocol.Stdin, buf[:n]) != nil {
				return
			}
		}
		if err != nil {
			_ = conn.Send(protocol.StdinEOF, nil)
			return
		}
	}
}

// forwardSignals passes signals that would end or resize us on to the command.
func forwardSignals(conn *qemu.Conn, tty bool) (stop func()) {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGQUIT, unix.SIGHUP)
	if tty {
		signal.Notify(signals, unix.SIGWINCH)
	}
	go func() {
		for s := range signals {
			if s == unix.SIGWINCH {
				if cols, rows, err := term.GetSize(0); err == nil {
					_ = conn.Send(protocol.Resize, protocol.Size(uint16(rows), uint16(cols)))
				}
				continue
			}
			_ = conn.Send(protocol.Signal, []byte{byte(s.(unix.Signal))})
		}
	}()
	return func() { signal.Stop(signals) }
}
