// Command benchcompare compares the JSON reports of two programs whose benchmarks were
// run alternately (scripts/bench-compare.sh). For each measure it prints the median
// and the spread of both, and whether the second program is within the spread of
// the first or within 10 % of its median. Times are divided by the floor of
// their own run where the report has one, because machines are noisy.
//
//	go run ./scripts/benchcompare DIR     # DIR/NAME.before.N.json, DIR/NAME.after.N.json
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "benchcompare:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	if len(args) != 1 {
		return errors.New("give one folder with NAME.before.N.json and NAME.after.N.json")
	}
	paths, err := filepath.Glob(filepath.Join(args[0], "*.json"))
	if err != nil {
		return err
	}
	all := map[string]*comparison{}
	for _, path := range paths {
		name, side, ok := parseName(filepath.Base(path))
		if !ok {
			return fmt.Errorf("%s: the name must be NAME.before.N.json or NAME.after.N.json", path)
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		measures, err := parseReport(raw)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if all[name] == nil {
			all[name] = &comparison{}
		}
		all[name].add(side, measures)
	}
	if len(all) == 0 {
		return fmt.Errorf("%s has no reports", args[0])
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if err := all[name].print(out, name); err != nil {
			return err
		}
	}
	return nil
}

// side says which of the two programs made a report.
type side int

const (
	before side = iota
	after
)

func parseName(base string) (name string, s side, ok bool) {
	rest, found := strings.CutSuffix(base, ".json")
	parts := strings.Split(rest, ".")
	if !found || len(parts) != 3 {
		return "", 0, false
	}
	switch parts[1] {
	case "before":
		return parts[0], before, true
	case "after":
		return parts[0], after, true
	}
	return "", 0, false
}

// summary has the fields of bench.Summary that are compared.
type summary struct {
	N   int     `json:"n"`
	P50 float64 `json:"p50_ms"`
}

// parseReport returns the measures of a report: the median of each sample,
// divided by the floor if the report has a floor, and each number of bytes or
// milliseconds.
func parseReport(raw []byte) (map[string]float64, error) {
	var top map[string]json.RawMessage
	if err := json.Unmarshal(raw, &top); err != nil {
		return nil, err
	}
	out := map[string]float64{}
	collect(out, "", top)
	return out, nil
}

func collect(out map[string]float64, prefix string, object map[string]json.RawMessage) {
	var floor summary
	_ = json.Unmarshal(object["floor"], &floor) // without a floor the times stay in ms
	for key, raw := range object {
		name := prefix + key
		var number float64
		if json.Unmarshal(raw, &number) == nil {
			if strings.HasSuffix(key, "_bytes") || strings.HasSuffix(key, "_ms") || strings.HasSuffix(key, "_ratio") {
				out[name] = number
			}
			continue
		}
		var inner map[string]json.RawMessage
		if json.Unmarshal(raw, &inner) != nil {
			continue
		}
		var s summary
		switch _, sample := inner["p50_ms"]; {
		case !sample:
			collect(out, name+".", inner)
		case json.Unmarshal(raw, &s) != nil || s.N == 0: // not measured
		case key != "floor" && floor.P50 > 0:
			out[name+" (floors)"] = s.P50 / floor.P50
		default:
			out[name+" (ms)"] = s.P50
		}
	}
}

// comparison holds, by measure, the values of each side's runs.
type comparison struct{ values [2]map[string][]float64 }

func (c *comparison) add(s side, measures map[string]float64) {
	if c.values[s] == nil {
		c.values[s] = map[string][]float64{}
	}
	for name, v := range measures {
		c.values[s][name] = append(c.values[s][name], v)
	}
}

func (c *comparison) print(out io.Writer, name string) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "%s\tbefore: median\tleast\tmost\tafter: median\tleast\tmost\tratio\t\n", name)
	for _, measure := range slices.Sorted(maps.Keys(c.values[before])) {
		b, a := c.values[before][measure], c.values[after][measure]
		if len(a) == 0 {
			fmt.Fprintf(w, "  %s\tafter has no such measure\n", measure)
			continue
		}
		fmt.Fprintf(w, "  %s\t%.4g\t%.4g\t%.4g\t%.4g\t%.4g\t%.4g\t%.2f\t%s\n", measure,
			median(b), slices.Min(b), slices.Max(b), median(a), slices.Min(a), slices.Max(a), ratio(median(a), median(b)), verdict(b, a))
	}
	fmt.Fprintln(w)
	return w.Flush()
}

// verdict judges whether the second program costs more. All measures are costs.
func verdict(b, a []float64) string {
	switch m := median(a); {
	case m < slices.Min(b):
		return "less"
	case m <= slices.Max(b):
		return "within the spread"
	case m <= 1.1*median(b):
		return "within 10 %"
	}
	return "MORE"
}

func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

// median returns the upper one of two values in the middle.
func median(values []float64) float64 {
	s := slices.Sorted(slices.Values(values))
	return s[len(s)/2]
}
