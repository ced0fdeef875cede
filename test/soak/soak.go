// Package soak says how often tests repeat steps whose failures are rare: a few times
// in make test, often in make soak.
package soak

import (
	"os"
	"strconv"
)

// env is set in make soak. A number above 1 bounds the counts.
const env = "AGENTRUN_SOAK"

// On reports whether this is make soak.
func On() bool { return os.Getenv(env) != "" }

// Count is n in make soak and reduced in make test.
func Count(n, reduced int) int {
	if !On() {
		return reduced
	}
	if most, err := strconv.Atoi(os.Getenv(env)); err == nil && most > 1 {
		n = max(reduced, min(n, most))
	}
	return n
}
