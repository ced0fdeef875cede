package layer

import "fmt"

// CheckRuns checks a list of runs that another process has sent: there are at
// most most of them, they are in whole pages, sorted, disjoint and inside size
// bytes. So their lengths add up to at most size.
func CheckRuns(runs []Run, size uint64, most int) error {
	if len(runs) > most {
		return fmt.Errorf("%d runs: at most %d are possible", len(runs), most)
	}
	return validateRuns(runs, size)
}

// CheckChange checks what another process says about a new layer of an image of
// size bytes: the runs that the layer holds, and those that have become zeros. A
// page is in one of the two lists at most.
func CheckChange(runs, zeros []Run, size uint64) error {
	if err := CheckRuns(runs, size, MaxRuns); err != nil {
		return err
	}
	if err := CheckRuns(zeros, size, MaxRuns); err != nil {
		return fmt.Errorf("zeros: %w", err)
	}
	for len(runs) > 0 && len(zeros) > 0 {
		r, z := runs[0], zeros[0]
		switch {
		case r.end() <= z.Start:
			runs = runs[1:]
		case z.end() <= r.Start:
			zeros = zeros[1:]
		default:
			return fmt.Errorf("run %#x+%#x and zeros %#x+%#x overlap", r.Start, r.Length, z.Start, z.Length)
		}
	}
	return nil
}

// Total is the sum of the runs' lengths, which were checked.
func Total(runs []Run) (bytes uint64) {
	for _, r := range runs {
		bytes += r.Length
	}
	return bytes
}
