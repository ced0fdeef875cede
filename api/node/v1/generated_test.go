package nodev1

import (
	"bytes"
	"flag"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bufbuild/protocompile"
	"github.com/bufbuild/protocompile/protoutil"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
)

var update = flag.Bool("update", false, "write what is generated")

// plugins generate Go code from the description.
var plugins = []string{
	"google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12",
	"google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2",
}

// name is the file's name in the registry of all linked files.
const name = "agentrun/node/v1/node.proto"

// compile does the work of protoc: it reads node.proto and returns the request
// for the plugins.
func compile(t *testing.T) *pluginpb.CodeGeneratorRequest {
	t.Helper()
	c := protocompile.Compiler{
		Resolver: protocompile.WithStandardImports(&protocompile.SourceResolver{
			Accessor: func(path string) (io.ReadCloser, error) {
				if path != name {
					return nil, fs.ErrNotExist
				}
				return os.Open(filepath.Base(name))
			},
		}),
		SourceInfoMode: protocompile.SourceInfoStandard, // for comments
	}
	files, err := c.Compile(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	req := &pluginpb.CodeGeneratorRequest{FileToGenerate: []string{name}, Parameter: proto.String("paths=source_relative")}
	seen := map[string]bool{}
	var add func(f protoreflect.FileDescriptor)
	add = func(f protoreflect.FileDescriptor) { // imports first
		if seen[f.Path()] {
			return
		}
		seen[f.Path()] = true
		for i := range f.Imports().Len() {
			add(f.Imports().Get(i).FileDescriptor)
		}
		req.ProtoFile = append(req.ProtoFile, protoutil.ProtoFromFileDescriptor(f))
	}
	add(files[0])
	return req
}

// TestGenerated: the generated code is up to date with node.proto and the
// plugins.
func TestGenerated(t *testing.T) {
	request, err := proto.Marshal(compile(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, plugin := range plugins {
		cmd := exec.CommandContext(t.Context(), "go", "run", plugin)
		cmd.Stdin, cmd.Stderr = bytes.NewReader(request), os.Stderr
		out, err := cmd.Output()
		var answer pluginpb.CodeGeneratorResponse
		if err == nil {
			err = proto.Unmarshal(out, &answer)
		}
		if err != nil || answer.GetError() != "" || len(answer.File) == 0 {
			t.Fatalf("%s: %v %s", plugin, err, answer.GetError())
		}
		for _, f := range answer.File {
			file := filepath.Base(f.GetName())
			if *update {
				if err := os.WriteFile(file, []byte(f.GetContent()), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			have, err := os.ReadFile(file)
			if err != nil || string(have) != f.GetContent() {
				t.Errorf("%s is not what is made of node.proto: run go generate ./api/node/v1 (%v)", file, err)
			}
		}
	}
}

// TestDescription: every method has its own request type, so that each can grow,
// and every value of an enumeration carries the enumeration's name.
func TestDescription(t *testing.T) {
	file := compile(t).ProtoFile
	f := file[len(file)-1]
	requests := map[string]string{}
	for _, m := range f.Service[0].Method {
		in := m.GetInputType()
		if in != "."+f.GetPackage()+"."+m.GetName()+"Request" || requests[in] != "" {
			t.Errorf("%s takes %s", m.GetName(), in)
		}
		requests[in] = m.GetName()
	}
	enums := f.EnumType
	for _, m := range f.MessageType {
		enums = append(enums, m.EnumType...)
	}
	for _, e := range enums {
		checkEnum(t, e)
	}
}

func checkEnum(t *testing.T, e *descriptorpb.EnumDescriptorProto) {
	t.Helper()
	var prefix strings.Builder
	for i, r := range e.GetName() {
		if i > 0 && r >= 'A' && r <= 'Z' {
			prefix.WriteByte('_')
		}
		prefix.WriteRune(r)
	}
	for _, v := range e.Value {
		if !strings.HasPrefix(v.GetName(), strings.ToUpper(prefix.String())+"_") {
			t.Errorf("%s has %s", e.GetName(), v.GetName())
		}
	}
	if zero := e.Value[0]; zero.GetNumber() != 0 || !strings.HasSuffix(zero.GetName(), "_UNSPECIFIED") {
		t.Errorf("%s begins with %s", e.GetName(), zero.GetName())
	}
}
