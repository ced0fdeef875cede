// Package snapshot owns the folder that a saved machine is kept in:
//
//	<folder>/manifest.json    canonical JSON; its SHA-256 is the snapshot's id
//	<folder>/state            vCPUs and devices, in a form that the vmm knows
//	<folder>/layers/<digest>  the pages of memory and disks
//
// In the folder of a machine that held secrets (Private), the state is sealed and
// so are the layers that were written for it: layers/<digest>.sealed.
//
// A folder is complete in itself and never changes. It is made under another
// name (Builder) and moved into place when all of it is on the disk; it is
// moved away before it is deleted (Remove). Layers are shared between
// snapshots as hard links. What is read back is checked: anybody may have
// written it.
package snapshot
