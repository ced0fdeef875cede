package sandbox

// Versioned is what objects have that are watched.
type Versioned struct {
	// ResourceVersion is the number of the object's last write. Each write of any object
	// of a node has a number of its own, and later ones have greater numbers.
	ResourceVersion uint64 `json:"-"`
}

// SetResourceVersion is for those who read an object from where it is kept.
func (v *Versioned) SetResourceVersion(version uint64) { v.ResourceVersion = version }

// StateVersion is how far the objects of a node are.
type StateVersion struct {
	// ID is the name of the state folder. Another one has other objects and counts anew.
	ID string
	// Version is the resource version of the last write.
	Version uint64
}

// WatchRequest asks for what becomes of objects.
type WatchRequest struct {
	// Namespace is that of the objects; empty is all.
	Namespace Namespace
	// Kinds are those that are told of; none is all. KindNode is that of no namespace.
	Kinds []Kind
	// From is the resource version that the caller knows all objects of, as a list or an
	// event had it. 0 begins with all objects as they are.
	From uint64
	// State is the ID of the state folder that From is of; empty is not checked.
	State string
}

// EventType says what an event tells.
type EventType string

// The types of events.
const (
	// EventObject has an object as it is.
	EventObject EventType = "object"
	// EventDeleted has an object as it was. A sandbox is deleted when it has ended.
	EventDeleted EventType = "deleted"
	// EventSynced comes once, after all objects that were there at the beginning. The
	// object that was not told of by then does not exist.
	EventSynced EventType = "synced"
	// EventBookmark says that all changes until its resource version were told.
	EventBookmark EventType = "bookmark"
)

// Event is what a watch tells. A watch of From its resource version goes on after it.
type Event struct {
	Type EventType
	// ResourceVersion is that of the change. Events of objects that were there at the
	// beginning have that of the object; they are not in order, and no watch goes on from
	// one: the event of type synced has the version to go on from.
	ResourceVersion uint64
	// Kind is that of the object, and says which of the following there is.
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
