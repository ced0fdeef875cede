// Package pack lets snapshots travel: as one file, or as an artifact in an OCI
// registry. Both are the same thing, an OCI manifest whose configuration is the
// snapshot's own manifest, byte for byte, and whose layers are its parts:
//
//	manifest        artifactType application/vnd.agentrun.snapshot.v1
//	├─ config       manifest.json; its digest is the snapshot's id
//	├─ layer 0      state, zstd
//	├─ layer 1…n    ranges of layers, zstd; what no part covers is zeros
//	└─ signature    optional, as cosign stores it
//
// A file is a tar archive of an OCI image layout (Write, Read); a registry has
// the same blobs (Push, Pull). docs/design/pack.md has the format for other
// implementations.
//
// What is read was written by anybody. Nothing in a pack names a path; sizes are
// bounded before anything is read; each part is compared with its digest before
// it is decompressed and after; the snapshot comes into place whole or not at
// all.
package pack
