package main

import (
	"bytes"
	"context"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"net"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/spf13/cobra"
)

// hint is a command of agentrun that a text of the programs names.
type hint struct{ at, line string }

var (
	quotedHint  = regexp.MustCompile("`agentrun ([^`]+)`")
	exampleHint = regexp.MustCompile(`(?m)^ *agentrun (.+)$`)
	proseHint   = regexp.MustCompile(`\bagentrun ([a-z]+(?:-[a-z]+)*)`)
	verbs       = regexp.MustCompile(`%[sqvd]`)
)

// notCommands are the words after "agentrun" where that is the program.
var notCommands = []string{"or", "reads", "restores", "and", "runs", "itself"}

// TestHints: the command line accepts every command that an error, a help text or an
// example names. A command that is named with all its arguments gets as far as asking the
// daemon.
func TestHints(t *testing.T) {
	dir := t.TempDir()
	var asked atomic.Int64
	listener, err := net.Listen("unix", filepath.Join(dir, "socket"))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		http.Error(w, "the daemon of a test has nothing", http.StatusNotFound)
	})}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	settle(t, "", envServer, "unix://"+listener.Addr().String())

	quoted, examples, prose := hintsOfTree(t)
	if len(quoted) < 20 || len(examples) < 30 || len(prose) < 40 {
		t.Fatalf("only %d quoted hints, %d examples and %d names of commands were found", len(quoted), len(examples), len(prose))
	}
	run := 0
	for _, h := range quoted {
		cmd, words := h.find(t)
		if cmd == nil || !h.complete(cmd, words) {
			continue
		}
		run++
		before := asked.Load()
		if err := newHintRun(t.Context(), h.words()); asked.Load() == before {
			t.Errorf("%s: `agentrun %s` does not get as far as the daemon: %v", h.at, h.line, err)
		}
	}
	if run < 10 {
		t.Errorf("only %d commands were run", run)
	}
	for _, h := range examples {
		h.find(t)
	}
	root := newRootCommand()
	for _, h := range prose {
		if cmd, _, err := root.Find([]string{h.line}); err != nil || cmd == root {
			t.Errorf("%s: there is no `agentrun %s`", h.at, h.line)
		}
	}
}

func newHintRun(ctx context.Context, args []string) error {
	var out bytes.Buffer
	return run(ctx, args, strings.NewReader(""), &out, &out)
}

// words are the arguments of a hint, with placeholders filled in.
func (h hint) words() []string {
	words := strings.Fields(verbs.ReplaceAllString(h.line, "x1"))
	if len(words) > 1 && words[0] == "get" && words[1] == "x1" {
		words[1] = "pools"
	}
	return words
}

// find returns the command of a hint, and its arguments that are not flags. It fails the test
// if the command or one of its flags does not exist.
func (h hint) find(t *testing.T) (cmd *cobra.Command, args []string) {
	t.Helper()
	cmd, rest, err := newRootCommand().Find(h.words())
	if err != nil || !cmd.Runnable() && len(rest) > 0 || !cmd.HasParent() {
		t.Errorf("%s: there is no `agentrun %s` (%v)", h.at, h.line, err)
		return nil, nil
	}
	for i := 0; i < len(rest); i++ {
		name, isLong := strings.CutPrefix(rest[i], "--")
		switch {
		case rest[i] == "--":
			return cmd, append(args, rest[i+1:]...)
		case isLong:
			name, _, given := strings.Cut(name, "=")
			flag := cmd.Flag(name)
			if flag == nil {
				t.Errorf("%s: `agentrun %s` has no flag --%s", h.at, h.line, name)
			} else if flag.NoOptDefVal == "" && !given {
				i++
			}
		case len(rest[i]) > 1 && rest[i][0] == '-':
			for j, letter := range rest[i][1:] {
				flag := cmd.Flags().ShorthandLookup(string(letter))
				if flag == nil {
					t.Errorf("%s: `agentrun %s` has no flag -%c", h.at, h.line, letter)
				} else if flag.NoOptDefVal == "" && j == len(rest[i])-2 {
					i++
					break
				}
			}
		default:
			args = append(args, rest[i])
		}
	}
	return cmd, args
}

// complete reports whether a hint has all arguments of a command that asks a daemon.
func (h hint) complete(cmd *cobra.Command, args []string) bool {
	if cmd.Flag("server") == nil || cmd.Name() == "up" {
		return false
	}
	if err := cmd.ValidateArgs(args); err != nil {
		return len(args) > 0 // with some it is meant to be typed as it is
	}
	return len(args) > 0 || strings.Contains(h.line, "-n ") || cmd.Name() == "list"
}

// hintsOfTree are the commands that the strings of the programs name: in backquotes, in lines
// of their own, and all others, of which only the first word is sure to be of the command.
func hintsOfTree(t *testing.T) (quoted, examples, prose []hint) {
	t.Helper()
	files := token.NewFileSet()
	for _, root := range []string{"../../internal", "../../cmd"} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(files, path, nil, 0)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				text, ok := textOf(n)
				if !ok {
					return true
				}
				at := files.Position(n.Pos()).String()
				for _, m := range quotedHint.FindAllStringSubmatch(text, -1) {
					quoted = append(quoted, hint{at, m[1]})
				}
				text = quotedHint.ReplaceAllString(text, "")
				for _, m := range exampleHint.FindAllStringSubmatch(text, -1) {
					if strings.HasPrefix(m[0], " ") { // else it is a line of prose that begins so
						line := m[1]
						for _, end := range []string{" && ", " | ", " < "} {
							line, _, _ = strings.Cut(line, end)
						}
						examples = append(examples, hint{at, strings.TrimSpace(line)})
					}
				}
				for _, m := range proseHint.FindAllStringSubmatch(text, -1) {
					if !slices.Contains(notCommands, m[1]) {
						prose = append(prose, hint{at, m[1]})
					}
				}
				return false
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return quoted, examples, prose
}

// textOf is the text of a string, or of several that are joined, whose other parts are left
// to be filled in.
func textOf(n ast.Node) (string, bool) {
	switch n := n.(type) {
	case *ast.BasicLit:
		text, err := strconv.Unquote(n.Value)
		return text, n.Kind == token.STRING && err == nil
	case *ast.BinaryExpr:
		a, okA := textOf(n.X)
		b, okB := textOf(n.Y)
		if n.Op != token.ADD || !okA && !okB {
			return "", false
		}
		if !okA {
			a = "%s"
		}
		if !okB {
			b = "%s"
		}
		return a + b, true
	}
	return "", false
}
