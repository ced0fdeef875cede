package cli

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// ByteSize is a flag value such as 512M or 2G.
type ByteSize uint64

var units = []struct {
	suffix string
	shift  uint
}{{"T", 40}, {"G", 30}, {"M", 20}, {"K", 10}, {"", 0}}

// Set parses a number with an optional unit; Mi, MiB and MB all mean 2^20.
func (b *ByteSize) Set(s string) error {
	text := strings.ToUpper(strings.TrimSpace(s))
	text = strings.TrimSuffix(text, "B")
	text = strings.TrimSuffix(text, "I")
	for _, u := range units {
		digits, ok := strings.CutSuffix(text, u.suffix)
		if !ok {
			continue
		}
		n, err := strconv.ParseUint(digits, 10, 64)
		if err != nil || n > math.MaxUint64>>u.shift {
			break
		}
		*b = ByteSize(n << u.shift)
		return nil
	}
	return fmt.Errorf("%q is not a size: write something like 512M or 2G", s)
}

func (b *ByteSize) String() string {
	for _, u := range units {
		if n := uint64(*b); n != 0 && n%(1<<u.shift) == 0 {
			return strconv.FormatUint(n>>u.shift, 10) + u.suffix
		}
	}
	return "0"
}

// Type names the value in the help text.
func (*ByteSize) Type() string { return "size" }
