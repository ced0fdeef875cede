package forkd

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	nodev1 "agentrun.dev/api/node/v1"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server/remote"
)

// TestNodeOverTCP: with certificates of agentrun cert issue, a controller claims a
// sandbox for a namespace over TCP. Root's socket still works. The daemon follows changes
// of its certificates, and reports that it does not serve before it ends.
func TestNodeOverTCP(t *testing.T) {
	n := newNode(t)
	dir := t.TempDir()
	issue := func(role, name string, more ...string) access.MutualFiles {
		t.Helper()
		out, err := n.command(append([]string{"cert", "issue", name, "--role", role, "--out", dir}, more...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		_, ca, found := strings.Cut(strings.TrimSpace(string(out)), "its CA is ")
		if !found || !strings.HasPrefix(string(out), role+":"+name+", valid until 20") {
			t.Fatalf("%s", out)
		}
		return access.MutualFiles{Cert: filepath.Join(dir, name+".crt"), Key: filepath.Join(dir, name+".key"), CA: ca}
	}
	own := issue("node", "n1", "--host", "127.0.0.1")
	n.up("--node-listen", "127.0.0.1:0", "--node-cert", own.Cert, "--node-key", own.Key, "--node-ca", own.CA)
	said := regexp.MustCompile(`serving gRPC on (127\.0\.0\.1:\d+), to certificates of \S+/ca\.pem`).FindStringSubmatch(n.Log.String())
	if said == nil {
		t.Fatalf("it does not say where: %s", n.Log)
	}
	dial := func(files access.MutualFiles) *remote.Conn {
		t.Helper()
		conn, err := remote.Dial(remote.Target{Address: said[1], Node: "n1", Files: files})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() }) // the daemon has ended before
		return conn
	}
	ctx := t.Context()
	if _, err := healthv1.NewHealthClient(dial(openssl(t, own.CA))).Check(ctx, &healthv1.HealthCheckRequest{}); err != nil {
		t.Errorf("a certificate that openssl has made: %v", err)
	}
	conn := dial(issue("controller", "main"))
	w, err := healthv1.NewHealthClient(conn).Watch(ctx, &healthv1.HealthCheckRequest{Service: nodev1.Node_ServiceDesc.ServiceName})
	if err != nil {
		t.Fatal(err)
	}
	next := func(want healthv1.HealthCheckResponse_ServingStatus) {
		t.Helper()
		if got, err := w.Recv(); err != nil || got.GetStatus() != want {
			t.Errorf("%v, %v, not %s", got, err, want)
		}
	}
	next(healthv1.HealthCheckResponse_SERVING)

	n.template(pythonImage(t))
	node := remote.New(remote.As(conn, access.Acting{Principal: "kubernetes:default", Role: access.RoleUser, Namespaces: []sandbox.Namespace{"default"}}))
	key := sandbox.Key{Namespace: "default", Name: "a"}
	made, _, err := node.Claim(ctx, sandbox.ClaimRequest{Key: key, Spec: sandbox.ClaimSpec{Pool: "pool"}})
	if err != nil || made.State != sandbox.Running {
		t.Fatalf("%+v, %v", made, err)
	}
	if got, err := n.Client.Sandbox(ctx, "a"); err != nil || got.Id != string(made.ID) {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := remote.New(conn).Kill(ctx, key); !sandbox.HasCode(err, sandbox.CodeDenied) {
		t.Errorf("a controller for nobody: %v", err)
	}
	if _, err := remote.New(dial(issue("node", "n2", "--host", "127.0.0.2"))).Node(ctx); !sandbox.HasCode(err, sandbox.CodeDenied) {
		t.Errorf("another node: %v", err)
	}
	if _, err := node.Kill(ctx, key); err != nil {
		t.Error(err)
	}
	trail, err := os.ReadFile(filepath.Join(n.State, "forkd", "audit", "audit.log"))
	if err != nil || !regexp.MustCompile(`"principal":"kubernetes:default","via":"controller:main","verb":"grpc:ClaimSandbox","namespace":"default","object":"a","code":200,"remote":"127\.0\.0\.1:\d+"`).Match(trail) {
		t.Errorf("%s, %v", trail, err)
	}
	n.down()
	next(healthv1.HealthCheckResponse_NOT_SERVING)
	if _, err := w.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("%v", err)
	}
}

// openssl makes a gateway's certificate as docs/security.md describes it, signed by the
// CA of agentrun cert issue.
func openssl(t *testing.T, ca string) access.MutualFiles {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sh", "-ec", `
		openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout main.key -out main.csr -subj /CN=main
		printf 'subjectAltName=URI:spiffe://agentrun.dev/gateway/main\nextendedKeyUsage=clientAuth\n' >main.ext
		openssl x509 -req -in main.csr -CA "$1" -CAkey "$2" -days 7 -extfile main.ext -out main.crt`,
		"sh", ca, filepath.Join(filepath.Dir(ca), "authority.pem"))
	cmd.Dir = t.TempDir()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return access.MutualFiles{Cert: filepath.Join(cmd.Dir, "main.crt"), Key: filepath.Join(cmd.Dir, "main.key"), CA: ca}
}
