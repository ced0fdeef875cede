package rest

import (
	"net/http"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// CheckpointSandbox implements rest.ServerInterface.
func (a *api) CheckpointSandbox(w http.ResponseWriter, r *http.Request, namespace, name string, _ rest.CheckpointSandboxParams) {
	c, err := func() (c sandbox.CheckpointSize, err error) {
		var given rest.CheckpointCreate
		m, err := a.readMaking(w, r, namespace, name, &given, &given.Name)
		if err != nil {
			return c, err
		}
		c, replayed, err := a.Service.Checkpoint(r.Context(), sandbox.CheckpointRequest{Key: m.key, Source: m.from.Name, Once: m.once, When: m.when})
		noteReplay(w, replayed)
		return c, err
	}()
	a.answer(w, r, http.StatusCreated, restconv.FromCheckpoint(c), err)
}

// ListCheckpoints implements rest.ServerInterface.
func (a *api) ListCheckpoints(w http.ResponseWriter, r *http.Request, namespace string, q rest.ListCheckpointsParams) {
	listing(a, w, r, namespace, q.Limit, q.After, a.Service.Checkpoints,
		func(c sandbox.CheckpointSize) string { return string(c.Name) },
		server.Plain(restconv.FromCheckpoint))
}

// GetCheckpoint implements rest.ServerInterface.
func (a *api) GetCheckpoint(w http.ResponseWriter, r *http.Request, namespace, name string) {
	object(a, w, r, namespace, name, shown(a.Service.CheckpointOf, restconv.FromCheckpoint))
}

// DeleteCheckpoint implements rest.ServerInterface.
func (a *api) DeleteCheckpoint(w http.ResponseWriter, r *http.Request, namespace, name string, _ rest.DeleteCheckpointParams) {
	remove(a, w, r, namespace, name, a.Service.DeleteCheckpoint)
}

// RestoreCheckpoint implements rest.ServerInterface.
func (a *api) RestoreCheckpoint(w http.ResponseWriter, r *http.Request, namespace, name string, _ rest.RestoreCheckpointParams) {
	s, err := func() (s sandbox.Sandbox, err error) {
		var given rest.CheckpointRestore
		m, err := a.readMaking(w, r, namespace, name, &given, &given.Name)
		if err != nil {
			return s, err
		}
		spec, err := restconv.ToRestoreSpec(given)
		if err != nil {
			return s, err
		}
		s, replayed, err := a.Service.Restore(r.Context(), sandbox.RestoreRequest{Key: m.key, Checkpoint: m.from.Name, Spec: spec, Once: m.once})
		noteReplay(w, replayed)
		return s, err
	}()
	a.answerMade(w, r, s, err)
}
