package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"agentrun.dev/internal/storage/image"
	"golang.org/x/term"
)

// progressPrinter shows the progress of making an image, or of moving a snapshot: one line that
// changes on a terminal, a line per phase elsewhere.
type progressPrinter struct {
	w        io.Writer
	what     string
	terminal bool
	phase    image.Phase
	drawn    time.Time
	width    int
}

func newProgressPrinter(w io.Writer, what string) *progressPrinter {
	f, ok := w.(*os.File)
	return &progressPrinter{w: w, what: what, terminal: ok && term.IsTerminal(int(f.Fd()))}
}

// redraw is the time between changes of the line; people cannot read faster.
const redraw = 100 * time.Millisecond

func (p *progressPrinter) show(now image.Progress) {
	changed := now.Phase != p.phase
	p.phase = now.Phase
	if now.Phase == image.PhaseDone || !changed && (!p.terminal || time.Since(p.drawn) < redraw && now.Done != now.Total) {
		return
	}
	p.drawn = time.Now()
	line := p.what + ": " + string(now.Phase)
	switch {
	case p.terminal && now.Total > 0 && now.Layer == 0:
		line += fmt.Sprintf(" %s %s of %s", bar(now.Done, now.Total), mebibytes(now.Done), mebibytes(now.Total))
	case now.Phase == image.PhaseDownload:
		line += fmt.Sprintf(" %s in %d layers", mebibytes(now.Total), now.Layers)
	case now.Layer == 0 && now.Total > 0:
		line += " " + mebibytes(now.Total)
	case now.Phase == image.PhaseUnpack && p.terminal:
		line += fmt.Sprintf(" layer %d of %d", now.Layer, now.Layers)
	case now.Phase == image.PhaseWait:
		line += " for another process that makes the same image"
	}
	if !p.terminal {
		fmt.Fprintln(p.w, line)
		return
	}
	fmt.Fprintf(p.w, "\r%-*s", p.width, line)
	p.width = len(line)
}

// end erases the line.
func (p *progressPrinter) end() {
	if p.terminal && p.width > 0 {
		fmt.Fprintf(p.w, "\r%s\r", strings.Repeat(" ", p.width))
	}
}

func mebibytes(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }

func bar(done, total int64) string {
	const width = 24
	n := 0
	if total > 0 {
		n = int(min(max(done, 0), total) * width / total)
	}
	return "[" + strings.Repeat("#", n) + strings.Repeat(".", width-n) + "]"
}
