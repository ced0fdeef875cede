package main

import (
	"fmt"
	"os"
	"path"
	"strings"
)

// allowance permits the skip of tests whose package and name match its
// patterns.
type allowance struct {
	pkg, test, reason string
}

// readAllowed reads lines of PACKAGE TEST REASON. Both names are patterns of
// path.Match; the reason is required.
func readAllowed(file string) ([]allowance, error) {
	if file == "" {
		return nil, nil
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read the allowed skips: %w", err)
	}
	var list []allowance
	n := 0
	for line := range strings.Lines(string(data)) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		f := strings.Fields(line)
		if len(f) < 3 {
			return nil, fmt.Errorf("%s:%d: want PACKAGE TEST REASON", file, n)
		}
		a := allowance{f[0], f[1], strings.Join(f[2:], " ")}
		for _, pattern := range f[:2] {
			if _, err := path.Match(pattern, ""); err != nil {
				return nil, fmt.Errorf("%s:%d: pattern %q: %w", file, n, pattern, err)
			}
		}
		list = append(list, a)
	}
	return list, nil
}

func (a allowance) matches(pkg, test string) bool {
	p, _ := path.Match(a.pkg, pkg) // the patterns were checked when read
	t, _ := path.Match(a.test, test)
	return p && t
}
