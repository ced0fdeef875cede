// Package nodev1 is the gRPC API of a node for the controller of many, as
// node.proto describes it: messages, server and client, generated.
package nodev1

//go:generate go test -run TestGenerated -count=1 . -update
