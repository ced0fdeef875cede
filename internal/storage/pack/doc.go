// Package pack packs snapshots so that they can be copied between hosts: as one
// file, or as an artifact in an OCI registry. Both have the same content: an OCI
// manifest whose configuration is the snapshot's own manifest, byte for byte,
// and whose layers are the snapshot's parts:
//
//	manifest        artifactType application/vnd.agentrun.snapshot.v1
//	├─ config       manifest.json; its digest is the snapshot's id
//	├─ layer 0      state, zstd
//	├─ layer 1…n    ranges of layers, zstd; ranges without a part are zeros
//	└─ signature    optional, as cosign stores it
//
// A file is a tar archive of an OCI image layout (Write, Read). A registry
// stores the same blobs (Push, Pull). docs/design/pack.md describes the format
// for other implementations.
//
// A pack is untrusted input. Nothing in a pack names a path. Sizes are bounded
// before the content is read. Each part is compared with its digest before and
// after it is decompressed. The snapshot appears at its place complete, or not
// at all.
package pack
