//go:build !without_newest

package helper

import "agentrun.dev/internal/engine/gvisorctl"

// protocol is the version of the protocol that this helper speaks. This file holds
// the parts that the newest version has added. With the tag without_newest, this is
// the helper before that version, for the tests of updates.
const protocol = gvisorctl.SinceWire

// newest handles a request that the newest version of the protocol has added.
func newest(box *sandboxed, m *gvisorctl.Message, reply *gvisorctl.Message) (err error) {
	if m.Op != gvisorctl.OpWire {
		return errUnknown(m)
	}
	reply.Wire, err = box.hostEnd()
	return err
}
