// Package interpreter holds the drivers of interpreters, which the guest agent
// contains. A driver is a program in the interpreter's language, in one file, that
// uses only the interpreter's own standard library. The agent starts an interpreter
// and sends it its driver; docs/design/code.md describes their protocol.
//
// The drivers are a package of their own, and constants of the program, so that a
// fork that runs no code touches none of their pages.
package interpreter

import _ "embed" // the drivers

//go:embed python.py
var pythonDriver string

//go:embed python_text.py
var pythonText string

//go:embed shell.sh
var shellDriver string

//go:embed node.js
var nodeDriver string

// nodeBoot reads the driver from the control pipe and runs it.
const nodeBoot = `(() => {
  const read = (n) => {
    const b = Buffer.alloc(n);
    for (let at = 0; at < n; ) {
      const got = require("fs").readSync(3, b, at, n - at);
      if (got === 0) process.exit(70);
      at += got;
    }
    return b;
  };
  const source = read(read(4).readUInt32LE()).toString();
  require("vm").runInThisContext("(function (require) {" + source + "\n})", { filename: "<agentrun>" })(require);
})()`

// pythonBoot reads the driver from the control pipe and runs it. It uses a namespace
// of its own, because __main__ belongs to the user.
const pythonBoot = `import os
def read(n):
    b = b""
    while len(b) < n:
        p = os.read(3, n - len(b))
        if not p:
            os._exit(70)
        b += p
    return b
names = {"__name__": "__agentrun__"}
exec(compile(read(int.from_bytes(read(4), "little")), "<agentrun>", "exec"), names)
names["Kernel"]().serve()
`

// Language is a language for which interpreters exist.
type Language struct {
	Name     string
	Programs []string // the interpreter, under the names to look for
	Args     []string // arguments that it is started with
	Driver   []string // sent to it at once, joined; empty if Args contain it
	Lines    bool     // it is a shell, with a line-based protocol
	Text     bool     // it can tell whether a text is code or a command
	Env      bool     // it supports an environment for one execution
}

// Languages returns all languages.
func Languages() []Language {
	return []Language{
		{Name: "python", Programs: []string{"python3", "python"}, Args: []string{"-c", pythonBoot}, Driver: []string{pythonDriver, pythonText}, Text: true, Env: true},
		{Name: "bash", Programs: []string{"bash", "sh"}, Args: []string{"-c", shellDriver}, Lines: true},
		{Name: "node", Programs: []string{"node", "nodejs"}, Args: []string{"-e", nodeBoot}, Driver: []string{nodeDriver}},
	}
}

// Default is the language of a context without a language of its own.
const Default = "python"

// Names lists the languages.
func Names() string {
	s := ""
	for _, l := range Languages() {
		if s != "" {
			s += ", "
		}
		s += l.Name
	}
	return s
}

// Find returns the language of a name; "" is the default.
func Find(name string) (Language, bool) {
	for _, l := range Languages() {
		if l.Name == name || name == "" && l.Name == Default {
			return l, true
		}
	}
	return Language{}, false
}
