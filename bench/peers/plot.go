package peers

import (
	"fmt"
	"html"
	"math"
	"slices"
	"strings"
)

// Sizes of the chart, in its own units.
const (
	plotLeft   = 250 // the names of the measurements
	plotWidth  = 560 // the scale
	plotRight  = 150 // the longest bar's label
	barHeight  = 16
	groupGap   = 14
	plotTop    = 56
	legendLine = 18
)

// plotColors are the colors of the columns, in their order.
var plotColors = []string{"#1b6ca8", "#c8553d", "#e6a57e", "#4a7c59", "#9dbf9e", "#777777"}

type bar struct {
	column int
	ms     float64
	label  string
}

// threeDigits formats a number with three digits, or with all digits before the
// point.
func threeDigits(x float64) string {
	if x >= 100 {
		return fmt.Sprintf("%.0f", x)
	}
	return fmt.Sprintf("%.3g", x)
}

// SVG draws medians as bars on a logarithmic scale, grouped by measurement. Each is
// labelled with its milliseconds and its ratio to AgentRun's of the same way.
func (r Report) SVG() string {
	var groups [][]bar
	var names []string
	low, high := math.Inf(1), 0.0
	for _, m := range r.measures() {
		var bars []bar
		for i, c := range r.Columns {
			s := m.of(c)
			if s.N == 0 || s.P50 <= 0 {
				continue
			}
			label := threeDigits(s.P50) + " ms"
			if x := ratio(s.P50, r.ours(m, c.Way).P50); x != "" && c.Peer != AgentRun {
				label += " (" + x + "×)"
			}
			bars = append(bars, bar{i, s.P50, label})
			low, high = min(low, s.P50), max(high, s.P50)
		}
		if len(bars) > 0 {
			groups, names = append(groups, bars), append(names, m.name)
		}
	}
	if len(groups) == 0 {
		low, high = 1, 1
	}
	from, to := math.Floor(math.Log10(low)), math.Ceil(math.Log10(high))
	to = max(to, from+1)
	x := func(ms float64) float64 { return plotLeft + plotWidth*(math.Log10(ms)-from)/(to-from) }

	height := plotTop
	for _, g := range groups {
		height += len(g)*barHeight + groupGap
	}
	bottom := height
	height += 24 + legendLine*len(r.Columns)
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n",
		plotLeft+plotWidth+plotRight, height)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="white"/>`+"\n")
	text := func(x float64, y int, anchor, s string) {
		fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="%s">%s</text>`+"\n", x, y, anchor, html.EscapeString(s))
	}
	text(10, 20, "start", fmt.Sprintf("medians, milliseconds on a logarithmic scale; microVMs of %d MiB, %d vCPU; floor %s ms",
		r.Memory>>20, r.VCPUs, threeDigits(r.Floor.P50)))
	for e := from; e <= to; e++ {
		at := x(math.Pow(10, e))
		fmt.Fprintf(&b, `<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="#dddddd"/>`+"\n", at, plotTop-8, at, bottom)
		text(at, plotTop-12, "middle", fmt.Sprintf("%g", math.Pow(10, e)))
	}
	y := plotTop
	for i, g := range groups {
		text(plotLeft-8, y+len(g)*barHeight/2+4, "end", names[i])
		for _, v := range g {
			fmt.Fprintf(&b, `<rect x="%d" y="%d" width="%.1f" height="%d" fill="%s"/>`+"\n",
				plotLeft, y, max(1, x(v.ms)-plotLeft), barHeight-2, plotColors[v.column%len(plotColors)])
			text(x(v.ms)+4, y+barHeight-5, "start", v.label)
			y += barHeight
		}
		y += groupGap
	}
	y = bottom + 16
	for i, c := range r.Columns {
		label := c.name()
		if c.Failed != "" && !slices.ContainsFunc(groups, func(g []bar) bool {
			return slices.ContainsFunc(g, func(v bar) bool { return v.column == i })
		}) {
			label += " (not measured)"
		}
		fmt.Fprintf(&b, `<rect x="%d" y="%d" width="12" height="12" fill="%s"/>`+"\n", plotLeft, y-10, plotColors[i%len(plotColors)])
		text(plotLeft+18, y, "start", label)
		y += legendLine
	}
	b.WriteString("</svg>\n")
	return b.String()
}
