// Package forkd tests the daemon through the agentrun command, with scripts that
// read like the manual (testdata/*.txtar). It uses real sandboxes of this
// machine's engine.
package forkd

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"agentrun.dev/internal/engine"
	"agentrun.dev/internal/engine/pick"
	"agentrun.dev/internal/host/assets"
	"agentrun.dev/internal/storage/layer"
	"agentrun.dev/internal/storage/seal"
	"github.com/rogpeppe/go-internal/testscript"
)

func TestScripts(t *testing.T) {
	folder, err := assets.Folder()
	if err != nil {
		t.Fatal(err)
	}
	image := pythonImage(t)
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		// The scripts run agentrun as a user does, from PATH.
		Setup: func(env *testscript.Env) error {
			env.Setenv("PATH", folder+string(os.PathListSeparator)+env.Getenv("PATH"))
			env.Setenv("IMAGE", image)
			if filepath.Base(env.WorkDir) == "script-images" {
				env.Setenv("REGISTRY", registryWith(t, image))
			}
			// A socket's path is short.
			state, err := os.MkdirTemp("", "agentrun-state-")
			if err != nil {
				return err
			}
			env.Setenv("AGENTRUN_STATE", state)
			env.Defer(func() {
				if err := leave(state); err != nil {
					t.Error(err)
				}
			})
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"new-key":     newKey,
			"until":       waitFor,
			"grab":        grab,
			"server":      findServer,
			"certificate": writeCertificate,
		},
		RequireExplicitExec: true,
	})
}

// leave ends the sandboxes that a script has left. The script's daemon has ended
// already, but sandboxes outlive daemons.
func leave(state string) error {
	machines, err := filepath.Glob(filepath.Join(state, "forkd", "machines", "*"))
	if err != nil || len(machines) == 0 {
		return errors.Join(err, forget(state))
	}
	e, closeEngine, err := openEngine(state)
	if err != nil {
		return err
	}
	var errs []error
	for _, m := range machines {
		errs = append(errs, e.Remove(context.Background(), m))
	}
	return errors.Join(append(errs, closeEngine(), forget(state))...)
}

// openEngine opens the engine that the daemons of these tests use, without a
// daemon.
func openEngine(state string) (e engine.Engine, closeAll func() error, err error) {
	resident, err := os.MkdirTemp("/dev/shm", "agentrun-test-")
	if err != nil {
		return nil, nil, err
	}
	kind, _ := pick.Choose(pick.Auto)
	e, err = pick.Open(kind, pick.Config{Resident: resident, Scratch: filepath.Join(state, "scratch")})
	if err != nil {
		return nil, nil, errors.Join(err, os.RemoveAll(resident))
	}
	return e, func() error { return errors.Join(e.Close(), os.RemoveAll(resident)) }, nil
}

// forget deletes a state folder, and the layers in memory that a daemon, or
// commands without a daemon, had loaded from it.
func forget(state string) error {
	return errors.Join(os.RemoveAll(state), os.RemoveAll(layer.ResidentFolder(state)), os.RemoveAll(layer.ResidentFolder(filepath.Join(state, "forkd"))))
}

// newKey makes a key for secrets:
//
//	new-key FILE
func newKey(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: new-key FILE")
	}
	_, err := seal.OpenOrMake(ts.MkAbs(args[0]))
	ts.Check(err)
}

// waitFor repeats a command until its output matches:
//
//	until REGEXP agentrun ARG...
func waitFor(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: until REGEXP COMMAND [ARG...]")
	}
	const patience = 2 * time.Minute
	want, err := regexp.Compile(args[0])
	ts.Check(err)
	for begin := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		err := ts.Exec(args[1], args[2:]...)
		out := ts.ReadFile("stdout") + ts.ReadFile("stderr")
		if err == nil && want.MatchString(out) {
			return
		}
		if time.Since(begin) > patience {
			ts.Fatalf("%s never said %q; it last said %q (%v)", strings.Join(args[1:], " "), args[0], out, err)
		}
	}
}

// grab sets a variable to the match of an expression's first group in a file:
//
//	grab NAME REGEXP FILE
func grab(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: grab NAME REGEXP FILE")
	}
	want, err := regexp.Compile(args[1])
	ts.Check(err)
	found := want.FindStringSubmatch(ts.ReadFile(args[2]))
	if len(found) != 2 {
		ts.Fatalf("%s has no %s", args[2], args[1])
	}
	ts.Setenv(args[0], found[1])
}

// findServer sets SERVER to the URL that a daemon has printed:
//
//	server LOG [SCHEME]
func findServer(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 1 || len(args) > 2 {
		ts.Fatalf("usage: server LOG [SCHEME]")
	}
	scheme := "https"
	if len(args) == 2 {
		scheme = args[1]
	}
	grab(ts, false, []string{"SERVER", `serving on (127\.0\.0\.1:\d+)`, args[0]})
	ts.Setenv("SERVER", scheme+"://"+ts.Getenv("SERVER"))
}

// writeCertificate writes a self-signed certificate for 127.0.0.1, and its key:
//
//	certificate CERT KEY
func writeCertificate(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: certificate CERT KEY")
	}
	s := httptest.NewTLSServer(nil)
	defer s.Close()
	pair := s.TLS.Certificates[0]
	key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	ts.Check(err)
	for i, block := range []*pem.Block{{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}, {Type: "PRIVATE KEY", Bytes: key}} {
		ts.Check(os.WriteFile(ts.MkAbs(args[i]), pem.EncodeToMemory(block), 0o600))
	}
}
