//go:build !without_newest

package vmmserver

import (
	"os"

	"agentrun.dev/internal/vmm/vmmctl"
)

// protocol is the version of the protocol that this vmm speaks. What the newest version has
// added is in this file: with the tag without_newest, this is the vmm before it, for the
// tests of updates.
const protocol = vmmctl.SincePlug

// newest serves a message that the newest version of the protocol has added.
func (s *server) newest(conn *vmmctl.Conn, m vmmctl.Message, files []*os.File) (done bool, err error) {
	if p, ok := m.(*vmmctl.Plug); ok && len(files) == 1 {
		return true, reply(conn, p.ID, s.vm.Plug(int(p.Net), files[0]), nil)
	}
	return false, nil
}
