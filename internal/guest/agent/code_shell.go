package agent

import (
	"bytes"
	"io"
	"strconv"

	"golang.org/x/sys/unix"

	"agentrun.dev/internal/guest/guestrpc"
)

// maxShellLine bounds an answer of a shell.
const maxShellLine = 256

// shellRequests encodes the requests that a shell needs for an execution.
func shellRequests(reseed bool, set, unset []string, e *execution) []byte {
	var b []byte
	if reseed {
		var seed [2]byte
		if _, err := unix.Getrandom(seed[:], 0); err == nil { // cannot block: the generator was seeded long ago
			b = shellLine(b, 'e', "RANDOM="+strconv.Itoa(int(seed[0])<<8|int(seed[1])))
		}
	}
	for _, name := range unset {
		if validShellName(name) {
			b = shellLine(b, 'e', "unset -v "+name)
		}
	}
	for _, kv := range set {
		// Shells have no variables of other names.
		if name := envName(kv); validShellName(name) {
			b = shellLine(b, 'e', "export "+name+"="+shellQuote(kv[len(name)+1:]))
		}
	}
	if e.warm {
		return b
	}
	return shellLine(b, 'r', e.source)
}

// validShellName reports whether a shell can have a variable of that name.
func validShellName(name string) bool {
	for i := range len(name) {
		c := name[i]
		if c != '_' && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return name != ""
}

func shellQuote(s string) string {
	b := []byte{'\''}
	for i := range len(s) {
		if s[i] == '\'' {
			b = append(b, `'\'`...)
		}
		b = append(b, s[i])
	}
	return string(append(b, '\''))
}

// shellLine appends a request: a letter, and text as printf %b reads it.
func shellLine(b []byte, kind byte, text string) []byte {
	b = append(b, kind)
	for i := range len(text) {
		switch c := text[i]; {
		case c == '\\':
			b = append(b, `\\`...)
		case c == '\n':
			b = append(b, `\n`...)
		default:
			b = append(b, c)
		}
	}
	return append(b, '\n')
}

// readLines is readFrames for a shell.
func (k *interpreterProcess) readLines(r io.Reader) error {
	var line []byte
	buf := make([]byte, maxShellLine)
	isReady := false
	for {
		n, err := r.Read(buf)
		if err != nil {
			return io.EOF
		}
		line = append(line, buf[:n]...)
		for {
			one, rest, whole := bytes.Cut(line, []byte{'\n'})
			if len(one) > maxShellLine {
				return errInterpreterFrame
			}
			if !whole {
				break
			}
			if err := k.shellSaid(one, &isReady); err != nil {
				return err
			}
			line = rest
		}
	}
}

func (k *interpreterProcess) shellSaid(line []byte, isReady *bool) error {
	word, rest, _ := bytes.Cut(line, []byte{' '})
	if (string(word) == "ready") == *isReady {
		return errInterpreterOrder
	}
	switch string(word) {
	case "ready":
		*isReady = true
		k.version = string(rest)
		close(k.ready)
		return nil
	case "begin":
		select {
		case k.begin <- struct{}{}:
			return nil
		default:
			return errInterpreterOrder
		}
	case "done":
		text, hit, _ := bytes.Cut(rest, []byte{' '})
		status, err := strconv.ParseUint(string(text), 10, 8)
		if err != nil {
			return errInterpreterField
		}
		r := executionEnd{code: int32(status)}
		if len(hit) > 0 {
			r = executionEnd{state: guestrpc.CodeInterrupted, code: 130}
		}
		return k.say(r)
	}
	return errInterpreterField
}
