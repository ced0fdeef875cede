package server

import (
	"context"
	"net/http"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/sandbox"
)

// CheckpointSandbox implements rest.ServerInterface.
func (a *api) CheckpointSandbox(w http.ResponseWriter, r *http.Request, namespace, name string, _ rest.CheckpointSandboxParams) {
	c, err := func() (c sandbox.CheckpointSize, err error) {
		source, err := key(namespace, name)
		if err != nil {
			return c, err
		}
		var given rest.CheckpointCreate
		body, err := a.readJSON(w, r, maxBody, &given)
		if err != nil {
			return c, err
		}
		k, err := named(source, given.Name)
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

// named is the key of what is made of an object: by the name that was given, or
// by one that is made up.
func named(of sandbox.Key, given string) (k sandbox.Key, err error) {
	k = sandbox.Key{Namespace: of.Namespace, Name: sandbox.NewName(of.Name)}
	if given != "" {
		k.Name, err = sandbox.ParseName(given)
	}
	return k, err
}

// ListCheckpoints implements rest.ServerInterface.
func (a *api) ListCheckpoints(w http.ResponseWriter, r *http.Request, namespace string, q rest.ListCheckpointsParams) {
	p, err := page(q.Limit, q.After)
	listing(a, w, r, namespace, p, err, a.Service.Checkpoints,
		func(c sandbox.CheckpointSize) string { return string(c.Name) },
		plain(restconv.FromCheckpoint),
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
		from, err := key(namespace, name)
		if err != nil {
			return s, err
		}
		var given rest.CheckpointRestore
		body, err := a.readJSON(w, r, maxBody, &given)
		if err != nil {
			return s, err
		}
		k, err := named(from, given.Name)
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
