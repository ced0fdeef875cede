package server

import "agentrun.dev/internal/sandbox"

// MaxObject is the length of an object in the audit log: names and ids fit.
const MaxObject = 256

// AuditFailed refuses what would not be in the log.
func AuditFailed() error {
	return sandbox.Errorf(CodeAudit, "the audit log of the node cannot be written, so nothing is done that belongs into it").
		Try("Make room on the disk of the daemon's state folder")
}
