package soak

import "testing"

func TestCount(t *testing.T) {
	for value, want := range map[string]int{"": 5, "1": 100, "yes": 100, "30": 30, "2": 5, "1000": 100} {
		t.Setenv(env, value)
		if got := Count(100, 5); got != want || On() != (value != "") {
			t.Errorf("%q: %d, %t", value, got, On())
		}
	}
}
