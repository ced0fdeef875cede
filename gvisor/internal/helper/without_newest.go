//go:build without_newest

package helper

import "agentrun.dev/internal/engine/gvisorctl"

const protocol = gvisorctl.SinceStream

func newest(_ *sandboxed, m *gvisorctl.Message, _ *gvisorctl.Message) error { return errUnknown(m) }
