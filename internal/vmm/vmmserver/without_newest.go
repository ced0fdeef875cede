//go:build without_newest

package vmmserver

import (
	"os"

	"agentrun.dev/internal/vmm/vmmctl"
)

const protocol = vmmctl.SinceStream

func (*server) newest(*vmmctl.Conn, vmmctl.Message, []*os.File) (done bool, err error) {
	return false, nil
}
