package bench

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// FloorCommand is the argument with which a measuring program is started again to
// sample the floor. The program must then call ServeFloor.
const FloorCommand = "bench-floor"

// Floor samples the floor in a process of its own. In the measuring process,
// KVM_CREATE_VM would visit every mapping of that process and every machine that it
// has made, and so slow down from sample to sample.
type Floor struct {
	process *exec.Cmd
	ask     io.WriteCloser
	answers *bufio.Reader
}

// NewFloor starts the process.
func NewFloor() (*Floor, error) {
	cmd := exec.Command("/proc/self/exe", FloorCommand)
	ask, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start the floor's process: %w", err)
	}
	answers, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start the floor's process: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the floor's process: %w", err)
	}
	return &Floor{cmd, ask, bufio.NewReader(answers)}, nil
}

// Sample starts one machine and returns how long it took until the host saw its first
// instruction. The machine is gone when Sample returns.
func (f *Floor) Sample() (time.Duration, error) {
	if _, err := io.WriteString(f.ask, "\n"); err != nil {
		return 0, fmt.Errorf("sample the floor: %w", err)
	}
	line, err := f.answers.ReadString('\n')
	if err != nil {
		return 0, fmt.Errorf("sample the floor: its process has ended: %w", err)
	}
	line = strings.TrimSpace(line)
	ns, err := strconv.ParseInt(line, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("sample the floor: %s", line)
	}
	return time.Duration(ns), nil
}

// Close ends the process.
func (f *Floor) Close() error { return errors.Join(f.ask.Close(), f.process.Wait()) }

// ServeFloor is the floor's process. It answers each line with the nanoseconds of a
// sample, or with an error, until its input ends.
func ServeFloor(in io.Reader, out io.Writer) error {
	f, err := newFloorHere()
	for lines := bufio.NewScanner(in); lines.Scan(); {
		var d time.Duration
		if err == nil {
			d, err = f.Sample()
			err = errors.Join(err, f.clear())
		}
		answer := strconv.FormatInt(d.Nanoseconds(), 10)
		if err != nil {
			answer = strings.ReplaceAll(err.Error(), "\n", "; ")
		}
		if _, err := fmt.Fprintln(out, answer); err != nil {
			return err
		}
	}
	if f == nil {
		return nil // the error was in every answer
	}
	return f.Close()
}
