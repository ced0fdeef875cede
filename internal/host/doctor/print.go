package doctor

import (
	"fmt"
	"io"
	"strings"
)

// Style says how to show a report to a person.
type Style struct {
	// Plain uses only ASCII.
	Plain bool
	// Color colours the marks, for terminals.
	Color bool
}

var (
	ticks  = map[Status]string{OK: "✓", Warn: "!", Fail: "✗"}
	words  = map[Status]string{OK: "ok  ", Warn: "warn", Fail: "FAIL"}
	colors = map[Status]string{OK: "\x1b[32m", Warn: "\x1b[33m", Fail: "\x1b[31m"}
)

const colorOff = "\x1b[0m"

// Print writes the report as text: a line per check, followed by its fix.
func (r Report) Print(w io.Writer, s Style) error {
	width := 0
	for _, c := range r.Checks {
		width = max(width, len(c.Name))
	}
	var b strings.Builder
	for _, c := range r.Checks {
		mark := ticks[c.Status]
		indent := 1
		if s.Plain {
			mark = words[c.Status]
			indent = len(mark)
		}
		if s.Color {
			mark = colors[c.Status] + mark + colorOff
		}
		fmt.Fprintf(&b, "%s %-*s  %s\n", mark, width, c.Name, c.Detail)
		if c.Fix != "" {
			fmt.Fprintf(&b, "%*s fix: %s\n", indent+1+width+1, "", c.Fix)
		}
	}
	fmt.Fprintf(&b, "\nengine: %s. %s\n", r.Engine, r.Advice)
	text := b.String()
	if s.Plain {
		text = strings.ReplaceAll(text, "×", "x")
	}
	_, err := io.WriteString(w, text)
	return err
}
