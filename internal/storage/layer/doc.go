// Package layer owns the content of memories and disks: immutable files of
// pages named by their digest (Ref), and flat lists that say which page comes
// from which layer (Stack).
//
//	stack      | zeros |  extent  |  extent  | zeros |  extent  |
//	                       │           │                  │
//	layer 0    | pages ◄───┘        ...│...           ◄───┘ |
//	layer 1    | pages ◄───────────────┘ |
//
// Overlay makes the stack of a child from its parent's stack and one new layer.
// Compact turns a stack into one with a single layer. Resident keeps layers in
// memory for vmm processes to map.
//
// A vmm process links this package, so its dependencies are small: no JSON, no
// network.
package layer
