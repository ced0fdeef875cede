package rest

import (
	"context"
	"net/http"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// CheckpointSandbox implements rest.ServerInterface.
func (a *api) CheckpointSandbox(w http.ResponseWriter, r *http.Request, namespace, name string, _ rest.CheckpointSandboxParams) {
	c, err := func() (c sandbox.CheckpointSize, err error) {
		source, err := sandbox.ParseKey(namespace, name)
		if err != nil {
			return c, err
		}
		var given rest.CheckpointCreate
		body, err := a.readJSON(w, r, server.MaxBody, &given)
		if err != nil {
			return c, err
		}
		k, err := server.Named(source, given.Name)
		if err != nil {
			return c, err
		}
		once, err := idempotent(r, body)
		if err != nil {
			return c, err
		}
		c, replayed, err := a.Service.Checkpoint(r.Context(), sandbox.CheckpointRequest{Key: k, Source: source.Name, Once: once})
		noteReplay(w, replayed)
		return c, err
	}()
	a.answer(w, r, http.StatusCreated, restconv.FromCheckpoint(c), err)
}

// ListCheckpoints implements rest.ServerInterface.
func (a *api) ListCheckpoints(w http.ResponseWriter, r *http.Request, namespace string, q rest.ListCheckpointsParams) {
	p, err := server.Page(q.Limit, q.After)
	listing(a, w, r, namespace, p, err, a.Service.Checkpoints,
		func(c sandbox.CheckpointSize) string { return string(c.Name) },
		server.Plain(restconv.FromCheckpoint),
		func(items []rest.Checkpoint, next string) any { return rest.CheckpointList{Items: items, Next: next} })
}

// GetCheckpoint implements rest.ServerInterface.
func (a *api) GetCheckpoint(w http.ResponseWriter, r *http.Request, namespace, name string) {
	object(a, w, r, namespace, name, func(ctx context.Context, k sandbox.Key) (rest.Checkpoint, error) {
		c, err := a.Service.CheckpointOf(ctx, k)
		return restconv.FromCheckpoint(c), err
	})
}

// DeleteCheckpoint implements rest.ServerInterface.
func (a *api) DeleteCheckpoint(w http.ResponseWriter, r *http.Request, namespace, name string) {
	remove(a, w, r, namespace, name, a.Service.DeleteCheckpoint)
}

// RestoreCheckpoint implements rest.ServerInterface.
func (a *api) RestoreCheckpoint(w http.ResponseWriter, r *http.Request, namespace, name string, _ rest.RestoreCheckpointParams) {
	s, err := func() (s sandbox.Sandbox, err error) {
		from, err := sandbox.ParseKey(namespace, name)
		if err != nil {
			return s, err
		}
		var given rest.CheckpointRestore
		body, err := a.readJSON(w, r, server.MaxBody, &given)
		if err != nil {
			return s, err
		}
		k, err := server.Named(from, given.Name)
		if err != nil {
			return s, err
		}
		spec, err := restconv.ToRestoreSpec(given)
		if err != nil {
			return s, err
		}
		once, err := idempotent(r, body)
		if err != nil {
			return s, err
		}
		s, replayed, err := a.Service.Restore(r.Context(), sandbox.RestoreRequest{Key: k, Checkpoint: from.Name, Spec: spec, Once: once})
		noteReplay(w, replayed)
		return s, err
	}()
	a.answerMade(w, r, s, err)
}
