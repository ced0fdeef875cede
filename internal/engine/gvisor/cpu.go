package gvisor

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"agentrun.dev/internal/storage/snapshot"
)

// processor describes this machine's processor and its features.
type processor struct {
	cpu      snapshot.CPU
	features []string // sorted
}

// hostProcessor reads the processor from the kernel.
func hostProcessor() (*processor, error) {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return nil, fmt.Errorf("look at the processor: %w", err)
	}
	defer func() { _ = f.Close() }() // only read
	p := &processor{cpu: snapshot.CPU{Profile: "host"}}
	lines := bufio.NewScanner(f)
	for lines.Scan() && lines.Text() != "" { // the first processor only
		name, value, _ := strings.Cut(lines.Text(), ":")
		value = strings.TrimSpace(value)
		number := func(to *int) {
			if n, err := strconv.Atoi(value); err == nil {
				*to = n
			}
		}
		switch strings.TrimSpace(name) {
		case "vendor_id":
			p.cpu.Vendor = value
		case "cpu family":
			number(&p.cpu.Family)
		case "model":
			number(&p.cpu.Model)
		case "stepping":
			number(&p.cpu.Stepping)
		case "flags":
			p.features = strings.Fields(value)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("look at the processor: %w", err)
	}
	if p.cpu.Vendor == "" || len(p.features) == 0 {
		return nil, errors.New("look at the processor: /proc/cpuinfo does not name it")
	}
	slices.Sort(p.features)
	p.features = slices.Compact(p.features)
	return p, nil
}

// lacks lists the features that this processor does not have.
func (p *processor) lacks(want []string) (missing []string) {
	for _, f := range want {
		if _, ok := slices.BinarySearch(p.features, f); !ok {
			missing = append(missing, f)
		}
	}
	return missing
}
