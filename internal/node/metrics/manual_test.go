package metrics

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/prometheus/promql/parser"

	"agentrun.dev/internal/node"
	"agentrun.dev/internal/sandbox"
)

var update = flag.Bool("update", false, "write the table of docs/metrics.md anew")

// empty is a source without anything.
type empty struct{}

func (empty) Overview() node.Overview                          { return node.Overview{} }
func (empty) Memory() (map[sandbox.Key]node.PoolMemory, error) { return nil, nil }

// described is a metric as the code has it.
type described struct {
	name, kind, help string
	labels           []string
}

var descText = regexp.MustCompile(`^Desc\{fqName: "([^"]+)", help: "((?:[^"\\]|\\.)*)", unit: "[^"]*", constLabels: \{([^}]*)\}, variableLabels: \{([^}]*)\}`)

// allMetrics lists what the code has.
func allMetrics(t *testing.T) map[string]described {
	t.Helper()
	m := New("v", "e")
	m.Watch(empty{})
	m.WatchNetwork(played{})
	descs := make(chan *prometheus.Desc)
	go func() {
		m.registry.Describe(descs)
		close(descs)
	}()
	all := map[string]described{}
	for d := range descs {
		parts := descText.FindStringSubmatch(d.String())
		if parts == nil {
			t.Fatalf("a description of another form: %s", d)
		}
		kind := "gauge"
		switch {
		case strings.HasSuffix(parts[1], "_total"):
			kind = "counter"
		case strings.HasSuffix(parts[1], "_seconds"):
			kind = "histogram"
		}
		var labels []string
		for pair := range strings.SplitSeq(parts[3], ",") {
			if name, _, found := strings.Cut(pair, "="); found {
				labels = append(labels, strings.TrimSpace(name))
			}
		}
		if parts[4] != "" {
			labels = append(labels, strings.Split(parts[4], ",")...)
		}
		all[parts[1]] = described{name: parts[1], kind: kind, help: parts[2], labels: labels}
	}
	return all
}

// TestManual: docs/metrics.md has every metric, its kind and its labels.
func TestManual(t *testing.T) {
	all := allMetrics(t)
	var names []string
	for name := range all {
		if strings.HasPrefix(name, namespace+"_") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	var table strings.Builder
	table.WriteString("| metric | kind | labels | what it is |\n|---|---|---|---|\n")
	for _, name := range names {
		m := all[name]
		fmt.Fprintf(&table, "| `%s` | %s | %s | %s |\n", m.name, m.kind, strings.Join(m.labels, ", "), m.help)
	}
	path := filepath.Join("..", "..", "..", "docs", "metrics.md")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	const begin, end = "<!-- metrics -->\n", "<!-- end of metrics -->\n"
	before, rest, found := strings.Cut(string(text), begin)
	_, after, ended := strings.Cut(rest, end)
	if !found || !ended {
		t.Fatalf("%s has no table between %q and %q", path, begin, end)
	}
	want := before + begin + table.String() + end + after
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if want != string(text) {
		t.Errorf("%s is not what the code has: run `go test ./internal/node/metrics -run TestManual -update`", path)
	}
}

// query is an expression of a dashboard or a rule.
type query struct{ where, text string }

// queries finds the expressions of a document, wherever they are in it.
func queries(where string, v any) (out []query) {
	switch v := v.(type) {
	case map[string]any:
		if title, ok := v["title"].(string); ok {
			where += " / " + title
		}
		for k, child := range v {
			text, ok := child.(string)
			switch {
			case ok && k == "expr":
				out = append(out, query{where, text})
			case ok && strings.HasPrefix(text, "label_values("):
				inner := strings.TrimSuffix(strings.TrimPrefix(text, "label_values("), ")")
				if i := strings.LastIndex(inner, ","); i > 0 {
					out = append(out, query{where, inner[:i]})
				}
			default:
				out = append(out, queries(where, child)...)
			}
		}
	case []any:
		for _, child := range v {
			out = append(out, queries(where, child)...)
		}
	}
	return out
}

// TestDashboard: every query of the dashboard parses, and the metrics and the
// labels in it are those of the code.
func TestDashboard(t *testing.T) {
	all := allMetrics(t)
	data, err := os.ReadFile(filepath.Join("..", "..", "..", "deploy", "grafana", "agentrun.json"))
	if err != nil {
		t.Fatal(err)
	}
	var board map[string]any
	if err := json.Unmarshal(data, &board); err != nil {
		t.Fatal(err)
	}
	found := queries("", board)
	used := map[string]bool{}
	for _, q := range found {
		for _, name := range checkQuery(t, all, q) {
			used[name] = true
		}
	}
	if len(found) < 40 {
		t.Errorf("%d queries were found", len(found))
	}
	for name := range all {
		if strings.HasPrefix(name, namespace+"_") && !used[name] {
			t.Errorf("nothing shows %s", name)
		}
	}
	// The test can fail.
	for _, bad := range []string{"agentrun_nothing", "sum(agentrun_capacity_bytes", `agentrun_capacity_bytes{pool="x"}`, "sum by (pool) (agentrun_capacity_bytes)"} {
		if problems := queryProblems(all, query{"", bad}); len(problems) == 0 {
			t.Errorf("%s was taken", bad)
		}
	}
}

func checkQuery(t *testing.T, all map[string]described, q query) (names []string) {
	t.Helper()
	for _, p := range queryProblems(all, q) {
		t.Errorf("%s: %s: %s", q.where, q.text, p)
	}
	e, err := parse(q.text)
	if err != nil {
		return nil
	}
	parser.Inspect(e, func(node parser.Node, _ []parser.Node) error {
		if m, ok := node.(*parser.VectorSelector); ok {
			names = append(names, familyOf(all, m.Name))
		}
		return nil
	})
	return names
}

// parse reads an expression, with values in place of Grafana's variables.
func parse(s string) (parser.Expr, error) {
	return parser.NewParser(parser.Options{}).ParseExpr(strings.ReplaceAll(s, "$__rate_interval", "5m"))
}

// familyOf is the metric that a series is of.
func familyOf(all map[string]described, name string) string {
	if _, ok := all[name]; ok {
		return name
	}
	for _, suffix := range []string{"_bucket", "_count", "_sum"} {
		if base, ok := strings.CutSuffix(name, suffix); ok && all[base].kind == "histogram" {
			return base
		}
	}
	return ""
}

// scraped are labels that Prometheus adds.
var scraped = []string{"__name__", "instance", "job", "le"}

func queryProblems(all map[string]described, q query) (problems []string) {
	e, err := parse(q.text)
	if err != nil {
		return []string{err.Error()}
	}
	var labels, grouped []string // of all metrics in it, and those that group them
	parser.Inspect(e, func(node parser.Node, _ []parser.Node) error {
		switch node := node.(type) {
		case *parser.AggregateExpr:
			grouped = append(grouped, node.Grouping...)
		case *parser.VectorSelector:
			family, ok := all[familyOf(all, node.Name)]
			if !ok {
				problems = append(problems, fmt.Sprintf("there is no metric %q", node.Name))
				return nil
			}
			labels = append(labels, family.labels...)
			for _, f := range node.LabelMatchers {
				if !slices.Contains(family.labels, f.Name) && !slices.Contains(scraped, f.Name) {
					problems = append(problems, fmt.Sprintf("%s has no label %s", node.Name, f.Name))
				}
			}
		}
		return nil
	})
	for _, l := range grouped {
		if !slices.Contains(labels, l) && !slices.Contains(scraped, l) {
			problems = append(problems, fmt.Sprintf("nothing in it has the label %s", l))
		}
	}
	return problems
}
