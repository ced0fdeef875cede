package sandbox

// Versioned is the part that all watched objects have.
type Versioned struct {
	// ResourceVersion is the number of the object's last write. Each write of any object
	// of a node has a number of its own, and later ones have greater numbers.
	ResourceVersion uint64 `json:"-"`
}

// SetResourceVersion is for the code that reads an object from the journal.
func (v *Versioned) SetResourceVersion(version uint64) { v.ResourceVersion = version }

// StateVersion is the version of all objects of a node.
type StateVersion struct {
	// ID is the name of the state folder. A node with another state folder has other
	// objects, and counts from the beginning.
	ID string
	// Version is the resource version of the last write.
	Version uint64
}

// WatchRequest asks for changes of objects.
type WatchRequest struct {
	// Namespace is that of the objects; empty is all namespaces.
	Namespace Namespace
	// Kinds are the kinds of objects to report; empty is all kinds. KindNode belongs
	// to no namespace.
	Kinds []Kind
	// From is a resource version from a list or an event: the caller knows all objects
	// as of that version. 0 begins with the present state of all objects.
	From uint64
	// State is the ID of the state folder that From belongs to; empty is not
	// checked.
	State string
}

// EventType is the type of an event.
type EventType string

// The types of events.
const (
	// EventObject has the present state of an object.
	EventObject EventType = "object"
	// EventDeleted has the last state of an object. A sandbox is deleted when it
	// has ended.
	EventDeleted EventType = "deleted"
	// EventSynced comes once, after all objects that existed at the beginning. An
	// object that was not reported before it does not exist.
	EventSynced EventType = "synced"
	// EventBookmark says that all changes up to its resource version were
	// reported.
	EventBookmark EventType = "bookmark"
)

// Event is one message of a watch. A watch with From its resource version continues
// after it.
type Event struct {
	Type EventType
	// ResourceVersion is that of the change. Events of objects that existed at the
	// beginning have the object's version. They are not in order, and no watch can
	// continue from one of them: the synced event has the version to continue from.
	ResourceVersion uint64
	// Kind is the kind of the object, and says which of the following fields
	// are set.
	Kind       Kind
	Node       *NodeStatus
	Template   *Template
	Builds     []Build // of the template
	Pool       *Pool
	PoolStatus PoolStatus
	Sandbox    *Sandbox
	Fork       *Fork
	Checkpoint *CheckpointSize
}
