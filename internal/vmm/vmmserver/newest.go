//go:build !without_newest

package vmmserver

import (
	"os"

	"agentrun.dev/internal/vmm/vmmctl"
)

// protocol is the version of the protocol that this vmm speaks. This file holds only the
// additions of the newest version: built with the tag without_newest, the program is the
// previous vmm, which the tests of updates need.
const protocol = vmmctl.SincePlug

// newest serves the messages that the newest version of the protocol added.
func (s *server) newest(conn *vmmctl.Conn, m vmmctl.Message, files []*os.File) (done bool, err error) {
	if p, ok := m.(*vmmctl.Plug); ok && len(files) == 1 {
		return true, reply(conn, p.ID, s.vm.Plug(int(p.Net), files[0]), nil)
	}
	return false, nil
}
