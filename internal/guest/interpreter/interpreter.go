// Package interpreter holds the drivers of interpreters, which the guest agent
// brings along: programs in the languages themselves, each of them one file that needs
// nothing but what its interpreter comes with. The agent starts an interpreter
// and sends it its driver; docs/design/code.md says what they speak.
//
// It is a package of its own, and its files are constants of the program: in a
// fork that runs no code, no page of them is touched.
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

// pythonBoot reads the driver from the control pipe and runs it. It has names of
// its own: __main__ is the user's.
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

// Language is one that interpreters exist for.
type Language struct {
	Name     string
	Programs []string // the interpreter, under the names to look for
	Args     []string // that it is started with
	Driver   []string // sent to it at once, as one; empty if Args hold it
	Lines    bool     // it is a shell, and is spoken to in lines
	Text     bool     // it can tell what a text is
	Env      bool     // it can have an environment for one execution
}

// Languages returns those there are.
func Languages() []Language {
	return []Language{
		{Name: "python", Programs: []string{"python3", "python"}, Args: []string{"-c", pythonBoot}, Driver: []string{pythonDriver, pythonText}, Text: true, Env: true},
		{Name: "bash", Programs: []string{"bash", "sh"}, Args: []string{"-c", shellDriver}, Lines: true},
		{Name: "node", Programs: []string{"node", "nodejs"}, Args: []string{"-e", nodeBoot}, Driver: []string{nodeDriver}},
	}
}

// Default is the language of a context that does not say.
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
