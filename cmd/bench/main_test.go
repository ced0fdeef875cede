package main

import (
	"bytes"
	"strings"
	"testing"
)

// TestRequired: the help says which flags a command requires.
func TestRequired(t *testing.T) {
	for command, flag := range map[string]string{
		"boot": "--rootfs", "claim": "--rootfs", "wake": "--rootfs", "peers": "--rootfs", "exec": "--image", "fanout": "--image",
	} {
		var help, none bytes.Buffer
		if err := run(t.Context(), []string{command, "--help"}, &none, &help, &none); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(help.String()) {
			if strings.Contains(line, " "+flag+" string") && strings.Count(line, "(required)") != 1 {
				t.Errorf("%s: %s", command, line)
			}
		}
		if err := run(t.Context(), []string{command}, &none, &none, &none); err == nil || !strings.Contains(err.Error(), strings.TrimPrefix(flag, "--")) {
			t.Errorf("%s without %s: %v", command, flag, err)
		}
	}
}
