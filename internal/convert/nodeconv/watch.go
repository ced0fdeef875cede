package nodeconv

import (
	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/convert"
	"agentrun.dev/internal/sandbox"
)

var (
	kinds = map[sandbox.Kind]nodev1.ObjectKind{
		sandbox.KindNode: nodev1.ObjectKind_OBJECT_KIND_NODE, sandbox.KindTemplate: nodev1.ObjectKind_OBJECT_KIND_TEMPLATE,
		sandbox.KindPool: nodev1.ObjectKind_OBJECT_KIND_POOL, sandbox.KindSandbox: nodev1.ObjectKind_OBJECT_KIND_SANDBOX,
		sandbox.KindFork: nodev1.ObjectKind_OBJECT_KIND_FORK, sandbox.KindCheckpoint: nodev1.ObjectKind_OBJECT_KIND_CHECKPOINT,
	}
	eventTypes = map[sandbox.EventType]nodev1.WatchEvent_Type{
		sandbox.EventObject: nodev1.WatchEvent_TYPE_OBJECT, sandbox.EventDeleted: nodev1.WatchEvent_TYPE_DELETED,
		sandbox.EventSynced: nodev1.WatchEvent_TYPE_SYNCED, sandbox.EventBookmark: nodev1.WatchEvent_TYPE_BOOKMARK,
	}
)

// FromWatch makes the request of Watch.
func FromWatch(r sandbox.WatchRequest) *nodev1.WatchRequest {
	out := &nodev1.WatchRequest{
		Namespace: string(r.Namespace), AllNamespaces: r.Namespace == "", ResourceVersion: r.From, StateId: r.State,
	}
	for _, k := range r.Kinds {
		out.Kinds = append(out.Kinds, kinds[k])
	}
	return out
}

// ToWatch reads the request of Watch.
func ToWatch(g *nodev1.WatchRequest) (sandbox.WatchRequest, error) {
	var r convert.Reader
	out := sandbox.WatchRequest{From: g.GetResourceVersion(), State: g.GetStateId()}
	switch {
	case !g.GetAllNamespaces():
		out.Namespace = r.Namespace(g.GetNamespace())
	case g.GetNamespace() != "":
		r.Fail(sandbox.Invalid("namespace", "there is one, and all_namespaces is set"))
	}
	for _, k := range g.GetKinds() {
		kind := inverse(kinds, k)
		if kind == "" {
			r.Fail(sandbox.Invalid("kinds", "%s is not a kind of object", k))
		}
		out.Kinds = append(out.Kinds, kind)
	}
	return out, r.Err()
}

// FromEvent converts an event. The caller adds the fields of a node that only the
// server knows.
func FromEvent(e sandbox.Event) *nodev1.WatchEvent {
	out := &nodev1.WatchEvent{Type: eventTypes[e.Type], ResourceVersion: e.ResourceVersion}
	switch {
	case e.Node != nil:
		out.Object = &nodev1.WatchEvent_Node{Node: FromNode(*e.Node)}
	case e.Template != nil:
		out.Object = &nodev1.WatchEvent_Template{Template: FromTemplate(*e.Template, e.Builds)}
	case e.Pool != nil:
		out.Object = &nodev1.WatchEvent_Pool{Pool: FromPool(*e.Pool, e.PoolStatus)}
	case e.Sandbox != nil:
		out.Object = &nodev1.WatchEvent_Sandbox{Sandbox: FromSandbox(*e.Sandbox)}
	case e.Fork != nil:
		out.Object = &nodev1.WatchEvent_Fork{Fork: FromFork(*e.Fork)}
	case e.Checkpoint != nil:
		out.Object = &nodev1.WatchEvent_Checkpoint{Checkpoint: FromCheckpoint(*e.Checkpoint)}
	}
	return out
}

// ToEvent reads an event.
func ToEvent(g *nodev1.WatchEvent) (sandbox.Event, error) {
	e := sandbox.Event{Type: inverse(eventTypes, g.GetType()), ResourceVersion: g.GetResourceVersion()}
	var err error
	switch g := g.GetObject().(type) {
	case *nodev1.WatchEvent_Node:
		e.Kind, e.Node = sandbox.KindNode, new(sandbox.NodeStatus)
		*e.Node, err = ToNode(g.Node)
	case *nodev1.WatchEvent_Template:
		e.Kind, e.Template = sandbox.KindTemplate, new(sandbox.Template)
		*e.Template, e.Builds, err = ToTemplate(g.Template)
	case *nodev1.WatchEvent_Pool:
		e.Kind, e.Pool = sandbox.KindPool, new(sandbox.Pool)
		*e.Pool, e.PoolStatus, err = ToPool(g.Pool)
	case *nodev1.WatchEvent_Sandbox:
		e.Kind, e.Sandbox = sandbox.KindSandbox, new(sandbox.Sandbox)
		*e.Sandbox, err = ToSandbox(g.Sandbox)
	case *nodev1.WatchEvent_Fork:
		e.Kind, e.Fork = sandbox.KindFork, new(sandbox.Fork)
		*e.Fork, err = ToFork(g.Fork)
	case *nodev1.WatchEvent_Checkpoint:
		e.Kind, e.Checkpoint = sandbox.KindCheckpoint, new(sandbox.CheckpointSize)
		*e.Checkpoint, err = ToCheckpoint(g.Checkpoint)
	}
	return e, err
}
