// Package nodeconv converts between the node's gRPC API (api/node/v1) and the
// vocabulary.
package nodeconv

import (
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/sandbox"
)

// These maps give the API's value for each value of an enumeration in package
// sandbox. Other values become unspecified.
var (
	phases = map[sandbox.Phase]nodev1.Phase{
		sandbox.PhasePending: nodev1.Phase_PHASE_PENDING, sandbox.PhaseBuilding: nodev1.Phase_PHASE_BUILDING,
		sandbox.PhaseReady: nodev1.Phase_PHASE_READY, sandbox.PhaseFailed: nodev1.Phase_PHASE_FAILED,
	}
	stages = map[sandbox.Stage]nodev1.Stage{sandbox.AfterInit: nodev1.Stage_STAGE_INIT, sandbox.AfterReady: nodev1.Stage_STAGE_READY}
	states = map[sandbox.State]nodev1.SandboxState{ // the API does not show a starting sandbox
		sandbox.Running: nodev1.SandboxState_SANDBOX_STATE_RUNNING, sandbox.Paused: nodev1.SandboxState_SANDBOX_STATE_PAUSED,
		sandbox.Hibernating: nodev1.SandboxState_SANDBOX_STATE_HIBERNATING, sandbox.Hibernated: nodev1.SandboxState_SANDBOX_STATE_HIBERNATED,
		sandbox.Resuming: nodev1.SandboxState_SANDBOX_STATE_RESUMING, sandbox.Ended: nodev1.SandboxState_SANDBOX_STATE_ENDED,
	}
	reasons = map[sandbox.Reason]nodev1.EndReason{
		sandbox.ReasonKilled: nodev1.EndReason_END_REASON_KILLED, sandbox.ReasonTimeout: nodev1.EndReason_END_REASON_TIMEOUT,
		sandbox.ReasonIdle: nodev1.EndReason_END_REASON_IDLE_TIMEOUT, sandbox.ReasonExited: nodev1.EndReason_END_REASON_EXITED,
		sandbox.ReasonCrashed: nodev1.EndReason_END_REASON_CRASHED, sandbox.ReasonOutOfMemory: nodev1.EndReason_END_REASON_OUT_OF_MEMORY,
		sandbox.ReasonHostRestart: nodev1.EndReason_END_REASON_HOST_RESTART, sandbox.ReasonLost: nodev1.EndReason_END_REASON_LOST,
	}
	actions = map[sandbox.TimeoutAction]nodev1.TimeoutAction{
		sandbox.TimeoutKill: nodev1.TimeoutAction_TIMEOUT_ACTION_KILL, sandbox.TimeoutPause: nodev1.TimeoutAction_TIMEOUT_ACTION_PAUSE,
		sandbox.TimeoutHibernate: nodev1.TimeoutAction_TIMEOUT_ACTION_HIBERNATE,
	}
)

// inverse looks up the key of a value in one of these maps.
func inverse[S ~string, N comparable](all map[S]N, given N) S {
	for s, n := range all {
		if n == given {
			return s
		}
	}
	return ""
}

// fromTime omits an unknown time.
func fromTime(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// toTime returns the zero time for a missing one.
func toTime(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}

// ToExpiry reads the time at which a sandbox ends. A missing time is zero: the
// sandbox does not end by itself.
func ToExpiry(field string, t *timestamppb.Timestamp) (time.Time, error) {
	if t != nil && (t.CheckValid() != nil || t.AsTime().IsZero()) {
		return time.Time{}, sandbox.Invalid(field, "it is no time of the years 1 to 9999")
	}
	return toTime(t), nil
}

// text replaces invalid UTF-8 like JSON does, in text of untrusted origin: gRPC does not send a
// message with invalid UTF-8 at all.
func text(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// fromDuration leaves out what is 0.
func fromDuration(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

// ToDuration reads a field with a duration; a missing one is 0.
func ToDuration(field string, d *durationpb.Duration) (time.Duration, error) {
	if d == nil {
		return 0, nil
	}
	got := d.AsDuration()
	// AsDuration returns the closest value that a time.Duration can have.
	if d.CheckValid() != nil || got < 0 || durationpb.New(got).Seconds != d.Seconds {
		return 0, sandbox.Invalid(field, "it is negative, or longer than can be")
	}
	return got, nil
}
