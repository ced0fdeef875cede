// Package snapshot owns the folder of a saved machine:
//
//	<folder>/manifest.json    canonical JSON; its SHA-256 is the snapshot's id
//	<folder>/state            vCPUs and devices, in a form that the vmm knows
//	<folder>/layers/<digest>  the pages of memory and disks
//
// In the folder of a machine that held secrets (Private), the state is sealed,
// and so are the layers that were written for it: layers/<digest>.sealed.
//
// A folder is self-contained and never changes. Builder makes it under a
// temporary name and moves it into place when everything is on disk. Remove moves
// it away before it deletes it. Snapshots share layers as hard links. All data
// that is read back is checked, because anybody may have written it.
package snapshot
