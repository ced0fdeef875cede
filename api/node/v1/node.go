// Package nodev1 is a node's gRPC API, for a controller of many nodes. Its
// messages, server and client are generated from node.proto.
package nodev1

//go:generate go test -run TestGenerated -count=1 . -update
