package rest

import (
	"bytes"
	"context"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/getkin/kin-openapi/openapi3"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/access/audit"
	"agentrun.dev/internal/client"
	"agentrun.dev/internal/node/managertest"
	"agentrun.dev/internal/sandbox"
	"agentrun.dev/internal/server"
)

// with is the same node with the credentials of a key or token.
func (n *testNode) with(credential string) *testNode {
	as := *n
	as.client = &http.Client{Transport: bearer{credential, n.client.Transport}}
	return &as
}

type bearer struct {
	credential string
	below      http.RoundTripper
}

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	if r.Header.Get("Authorization") == "" {
		r.Header.Set("Authorization", "Bearer "+b.credential)
	}
	return b.below.RoundTrip(r)
}

// key makes an API key.
func (n *testNode) key(role access.Role, namespaces ...sandbox.Namespace) string {
	n.t.Helper()
	text, _, err := n.Access.Create(access.KeySpec{Name: "test", Role: role, Namespaces: namespaces})
	if err != nil {
		n.t.Fatal(err)
	}
	return text
}

// token returns the token of a sandbox.
func (n *testNode) token(name sandbox.Name) string {
	n.t.Helper()
	s, err := n.Manager.Sandbox(n.t.Context(), sandbox.Key{Namespace: "default", Name: name})
	if err != nil {
		n.t.Fatal(err)
	}
	return n.Access.Token(s.ID)
}

// TestPermissions: every route in the description has a permission, under its
// own name, and no other route has one.
func TestPermissions(t *testing.T) {
	spec, _ := loadSpec(t)
	described := map[string]bool{}
	operations(spec, func(method, path string, op *openapi3.Operation, _ *openapi3.PathItem) {
		pattern := method + " " + path
		described[pattern] = true
		o, found := routes[pattern]
		switch {
		case !found:
			t.Errorf("%s has no operation", pattern)
		case string(o) != op.OperationID || o.Rule().Need == access.None:
			t.Errorf("%s is %+v, described as %s", pattern, o, op.OperationID)
		case o.Rule().Need < access.Change && (method == http.MethodDelete || method == http.MethodPut) && o.Rule().Need != access.Use:
			t.Errorf("%s only needs %d", pattern, o.Rule().Need)
		}
	})
	served := []access.Operation{portOperation, "watch", "getHealth", "putToken", "releaseOwner", "useSandbox", "findSandbox", "findToken",
		"getSnapshotOffer", "fetchSnapshot", "getSnapshotParts", "readSnapshot"} // all but the first by gRPC alone
	for pattern, o := range routes {
		if served = append(served, o); !described[pattern] {
			t.Errorf("%s is not described", pattern)
		}
	}
	for _, o := range access.Operations() {
		if !slices.Contains(served, o) {
			t.Errorf("nothing serves %s", o)
		}
	}
	for pattern, want := range map[string]target{
		"GET /v1/version": {},
		"GET /v1/namespaces/{namespace}/pools/{name}":                            {server.Target{Kind: sandbox.KindPool, Namespace: "ns", Name: "n"}, "pools/n"},
		"GET /v1/namespaces/{namespace}/sandboxes":                               {Target: server.Target{Namespace: "ns"}},
		"POST /v1/namespaces/{namespace}/sandboxes/{name}/pause":                 {server.Target{Kind: sandbox.KindSandbox, Namespace: "ns", Name: "n"}, "sandboxes/n"},
		"DELETE /v1/namespaces/{namespace}/sandboxes/{name}/code/contexts/{id}":  {server.Target{Kind: sandbox.KindSandbox, Namespace: "ns", Name: "n"}, "sandboxes/n/code/contexts/i"},
		"DELETE /v1/keys/{id}":                                                   {object: "keys/i"},
		"GET /v1/namespaces/{namespace}/sandboxes/{name}/ports/{port}/{path...}": {server.Target{Kind: sandbox.KindSandbox, Namespace: "ns", Name: "n"}, "sandboxes/n/ports/80"},
		"": {},
	} {
		_, path, _ := strings.Cut(pattern, " ")
		path = strings.NewReplacer("{namespace}", "ns", "{name}", "n", "{id}", "i", "{port}", "80", "{path...}", "secret/path").Replace(path)
		want.Operation = routes[pattern]
		if got := findTarget(pattern, path); got != want {
			t.Errorf("%s: %+v", path, got)
		}
	}
}

// attempt makes a request to a route of another object, with an invalid body:
// its result is about the rights, or about the body.
func (n *testNode) attempt(method, path string, names ...string) *response {
	n.t.Helper()
	for i := 0; i < len(names); i += 2 {
		path = strings.ReplaceAll(path, names[i], names[i+1])
	}
	var body any
	if method != http.MethodGet && method != http.MethodDelete {
		body = `{"nope":1}`
	}
	return n.do(method, strings.NewReplacer("{namespace}", "default", "{name}", "nobody", "{id}", "x", "{port}", "80").Replace(path), body)
}

// TestRoles: every route refuses each role that may not use it, and no other.
func TestRoles(t *testing.T) {
	n := newNode(t)
	roles := map[access.Role]*testNode{
		access.RoleViewer: n.with(n.key(access.RoleViewer, "default")), access.RoleUser: n.with(n.key(access.RoleUser, "default")),
		access.RoleAdmin: n.with(n.key(access.RoleAdmin)),
	}
	operations(n.spec, func(method, path string, op *openapi3.Operation, _ *openapi3.PathItem) {
		need := routes[method+" "+path].Rule().Need
		for role, as := range roles {
			res := as.attempt(method, path)
			if may := (access.Principal{Role: role}).May(need); may == (res.status == 403) {
				t.Errorf("%s as %s: %d %s", op.OperationID, role, res.status, res.body)
			}
			if res.status == 403 {
				res.refused(403, "permission_denied")
			}
		}
	})
}

// TestUnlisted: a route without an operation is refused, even to an
// administrator.
func TestUnlisted(t *testing.T) {
	n := newNode(t)
	admin := n.with(n.key(access.RoleAdmin))
	listed := routes
	t.Cleanup(func() { routes = listed })
	operations(n.spec, func(method, path string, _ *openapi3.Operation, _ *openapi3.PathItem) {
		routes = maps.Clone(listed)
		delete(routes, method+" "+path)
		admin.attempt(method, path).refused(403, "permission_denied")
	})
}

// TestOtherTenant: in no route can a key of another namespace reach an object,
// or tell existing objects from missing ones.
func TestOtherTenant(t *testing.T) {
	n := newNode(t)
	n.setUp()
	n.claim("there")
	n.do("POST", v1+"/sandboxes/there/forks", rest.ForkCreate{Name: "fork", Replicas: 1}).ok(201)
	id := as[rest.Sandbox](n.do("GET", v1+"/sandboxes/there", nil).ok(200)).Id
	exist := map[string]string{"templates": "python", "pools": "pool", "sandboxes": "there", "forks": "fork", "secrets": "secret", "checkpoints": "checkpoint"}
	n.do("POST", v1+"/sandboxes/there/checkpoints", rest.CheckpointCreate{Name: "checkpoint"}).ok(201)
	n.do("PUT", v1+"/secrets/secret", rest.SecretValues{StringData: map[string]string{"K": "v"}}).ok(200)
	mine := n.with(n.key(access.RoleUser, "mine", "default-2"))
	mine.do("GET", "/v1/namespaces/mine/sandboxes", nil).ok(200)
	tried := 0
	operations(n.spec, func(method, path string, op *openapi3.Operation, _ *openapi3.PathItem) {
		if !strings.Contains(path, "{namespace}") {
			return
		}
		there := exist[strings.Split(path, "/")[4]]
		if !strings.Contains(path, "{name}") || routes[method+" "+path].Rule().Makes {
			mine.attempt(method, path, "{name}", there).refused(403, "permission_denied")
			return
		}
		tried++
		missing := mine.attempt(method, path)
		missing.refused(404, "not_found")
		// By its name and by its id it looks like an unused name.
		for _, name := range []string{there, id} {
			found := mine.attempt(method, path, "{name}", name)
			if got := strings.Replace(string(found.body), name+" does not", "nobody does not", 1); found.status != missing.status || got != string(missing.body) {
				t.Errorf("%s: %d %s, for nothing %d %s", op.OperationID, found.status, found.body, missing.status, missing.body)
			}
		}
	})
	if tried < 30 {
		t.Errorf("only %d routes", tried)
	}
	// It says the same to the owner, if there is nothing.
	if a, b := mine.do("GET", v1+"/pools/nobody", nil), n.do("GET", v1+"/pools/nobody", nil); string(a.body) != string(b.body) {
		t.Errorf("%s and %s", a.body, b.body)
	}
	n.do("GET", v1+"/sandboxes/there", nil).ok(200)
	// An idempotency key is its principal's: another gets no answer of it.
	first := n.with(n.key(access.RoleUser, "default"))
	other := n.with(n.key(access.RoleUser, "default"))
	a := as[rest.Sandbox](first.do("POST", v1+"/sandboxes", rest.SandboxCreate{Pool: "pool"}, "Idempotency-Key", "k").ok(201))
	if b := as[rest.Sandbox](other.do("POST", v1+"/sandboxes", rest.SandboxCreate{Pool: "pool"}, "Idempotency-Key", "k").ok(201)); a.Id == b.Id {
		t.Error("two principals share an answer")
	}
}

// TestSandboxToken: it is for requests inside of one sandbox, as long as the
// sandbox lives.
func TestSandboxToken(t *testing.T) {
	n := newNode(t)
	n.setUp()
	made := as[rest.Sandbox](n.do("POST", v1+"/sandboxes", rest.SandboxCreate{Name: "mine", Pool: "pool"}, "Idempotency-Key", "k").ok(201))
	n.claim("other")
	if made.Token == "" || made.Token != n.token("mine") {
		t.Fatalf("%q", made.Token)
	}
	if body := n.do("GET", v1+"/sandboxes/mine", nil).ok(200).body; bytes.Contains(body, []byte("ars_")) {
		t.Errorf("it is shown again: %s", body)
	}
	if again := as[rest.Sandbox](n.do("POST", v1+"/sandboxes", rest.SandboxCreate{Name: "mine", Pool: "pool"}, "Idempotency-Key", "k").ok(201)); again.Token != made.Token {
		t.Errorf("the same request, another token: %q", again.Token)
	}
	mine := n.with(made.Token)
	operations(n.spec, func(method, path string, op *openapi3.Operation, _ *openapi3.PathItem) {
		o := routes[method+" "+path]
		need := o.Rule().Need
		res := mine.attempt(method, path, "{name}", "mine")
		allowed := need == access.Use || o == "getSandbox" || o == "getNetworkLog" || o == "getVersion"
		if allowed == (res.status == 403) {
			t.Errorf("%s: %d %s", o, res.status, res.body)
		}
		if !allowed || need == access.Anyone {
			return
		}
		missing, found := mine.attempt(method, path), mine.attempt(method, path, "{name}", "other")
		missing.refused(404, "not_found")
		if strings.ReplaceAll(string(found.body), "other", "nobody") != string(missing.body) {
			t.Errorf("%s: %s, for nothing %s", op.OperationID, found.body, missing.body)
		}
	})
	if r := as[rest.ExecResult](mine.do("POST", v1+"/sandboxes/mine/execs", rest.ExecRequest{Shell: "echo in"}).ok(200)); r.Stdout != "in\n" {
		t.Errorf("%+v", r)
	}
	// A fork has its own, and so has whatever gets the name next.
	fork := as[rest.Fork](n.do("POST", v1+"/sandboxes/mine/forks", rest.ForkCreate{Name: "f", Replicas: 2}).ok(201))
	if a, b := fork.Children[0].Token, fork.Children[1].Token; a == "" || a == b || a == made.Token || a != n.token("f-1") {
		t.Errorf("%q and %q", a, b)
	}
	if body := n.do("GET", v1+"/forks/f", nil).ok(200).body; bytes.Contains(body, []byte("ars_")) {
		t.Errorf("they are shown again: %s", body)
	}
	child := n.with(fork.Children[0].Token)
	child.do("GET", v1+"/sandboxes/f-1", nil).ok(200)
	child.do("GET", v1+"/sandboxes/mine", nil).refused(404, "not_found")
	mine.do("GET", v1+"/sandboxes/f-1", nil).refused(404, "not_found")
	n.do("DELETE", v1+"/sandboxes/mine", nil).ok(200)
	if e := mine.do("GET", v1+"/sandboxes/mine", nil).refused(401, "unauthenticated"); !strings.Contains(e.Cause, "ended") {
		t.Errorf("%+v", e)
	}
	n.claim("mine")
	mine.do("GET", v1+"/sandboxes/mine", nil).refused(401, "unauthenticated")
	mine.do("GET", "/v1/version", nil).refused(401, "unauthenticated")
}

// renamed is a node on which a name goes to another sandbox between the moment
// in which a request is authorised and the one in which it is served.
type renamed struct {
	server.Service
	before sandbox.Sandbox
	looks  int
}

func (s *renamed) Sandbox(ctx context.Context, k sandbox.Key) (sandbox.Sandbox, error) {
	s.looks++
	if s.looks == 1 {
		return s.before, nil
	}
	return s.Service.Sandbox(ctx, k)
}

func (s *renamed) SandboxOfToken(ctx context.Context, _ sandbox.Token) (sandbox.Sandbox, context.Context, error) {
	return s.before, ctx, nil
}

// TestTokenAndName: a token is for a sandbox, not for its name.
func TestTokenAndName(t *testing.T) {
	service := &renamed{before: sandbox.Sandbox{Key: sandbox.Key{Namespace: "default", Name: "a"}, ID: "aaaaaaaaaaaaaaaaaaaa"}}
	n := newNode(t, func(c *Config) { service.Service, c.Service = c.Service, service })
	n.setUp()
	n.claim("a")
	mine := n.with(n.Access.Token(service.before.ID))
	for _, c := range []struct{ method, path string }{{"GET", ""}, {"GET", "/execs"}, {"GET", "/files/stat?path=."}} {
		service.looks = 0
		mine.do(c.method, v1+"/sandboxes/a"+c.path, nil).refused(404, "not_found")
	}
}

// TestHostileCredentials: each is refused, with nothing to learn from how.
func TestHostileCredentials(t *testing.T) {
	n := newNode(t)
	n.setUp()
	n.claim("a")
	good, token := n.key(access.RoleAdmin), n.token("a")
	gone, k, err := n.Access.Create(access.KeySpec{Name: "gone", Role: access.RoleAdmin})
	if err == nil {
		err = n.Access.Revoke(k.ID)
	}
	if err != nil {
		t.Fatal(err)
	}
	expired, _, err := n.Access.Create(access.KeySpec{Name: "old", Role: access.RoleAdmin, Lifetime: time.Nanosecond})
	if err != nil {
		t.Fatal(err)
	}
	for name, header := range map[string]string{
		"empty": "Bearer", "blank": "Bearer ", "short": "Bearer x", "no scheme": good, "basic": "Basic " + good, "lower case": "bearer " + good,
		"cut by one": "Bearer " + good[:len(good)-1], "one more": "Bearer " + good + "a", "another secret": "Bearer " + good[:20] + strings.Repeat("a", len(good)-20),
		"only the id": "Bearer " + good[:15], "only the prefix": "Bearer ar_", "upper case": "Bearer " + strings.ToUpper(good), "twice": "Bearer " + good + " " + good,
		"huge": "Bearer ar_" + strings.Repeat("a", 50_000), "not ASCII": "Bearer ar_\xff\xfe", "quoted": `Bearer "` + good + `"`, "two of them": "Bearer " + good + ", Bearer " + good,
		"revoked": "Bearer " + gone, "expired": "Bearer " + expired,
		"a token of nobody": "Bearer ars_aaaaaaaaaaaaaaaaaaaa_" + token[25:], "half a token": "Bearer " + token[:30], "a token's prefix": "Bearer ars_",
		"a token that climbs": "Bearer ars_../../../../../../et_" + token[25:], "a token as key": "Bearer ar_" + token[4:], "a key as token": "Bearer ars_" + good[3:],
	} {
		t.Run(name, func(t *testing.T) {
			n := *n
			n.t = t
			res := n.do("GET", v1+"/pools", nil, "Authorization", header)
			e := res.refused(401, "unauthenticated")
			if res.header.Get("WWW-Authenticate") != "Bearer" || e.Remediation == "" {
				t.Errorf("it does not say how: %+v", e)
			}
			if wanted := name == "expired"; wanted != strings.Contains(e.Cause, "expired") {
				t.Errorf("%+v", e)
			}
			// A route that is not there tells nothing to a stranger.
			if other := n.do("GET", "/nothing", nil, "Authorization", header); string(other.body) != string(res.body) {
				t.Errorf("%s and %s", other.body, res.body)
			}
		})
	}
	r := n.request("GET", v1+"/pools", nil)
	r.Header["Authorization"] = []string{"Bearer " + good, "Bearer " + good}
	n.send(r).refused(401, "unauthenticated")
	n.do("GET", v1+"/pools", nil, "Authorization", "Bearer "+good).ok(200)
	// The principal of a request with a key is the key's, on the socket as
	// well.
	n.with(n.key(access.RoleViewer, "default")).do("DELETE", v1+"/pools/pool", nil).refused(403, "permission_denied")
}

// TestLocalUser: only users at the other end of a Unix socket need no key.
func TestLocalUser(t *testing.T) {
	ask := func(ctx context.Context) (access.Principal, error) {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, "/", nil)
		if err != nil {
			t.Fatal(err)
		}
		a := &api{Config: Config{Config: server.Config{Authenticator: access.Authenticator{}}}}
		return a.authenticate(r)
	}
	if _, err := ask(t.Context()); !sandbox.HasCode(err, access.CodeUnauthenticated) {
		t.Errorf("over no socket: %v", err)
	}
	if p, err := ask(context.WithValue(t.Context(), peerKey, uint32(os.Geteuid()+1))); !sandbox.HasCode(err, sandbox.CodeDenied) || p.Role != "" {
		t.Errorf("another user: %+v, %v", p, err)
	}
	if p, err := ask(context.WithValue(t.Context(), peerKey, uint32(0))); err != nil || p.Name != "uid:0" || p.Role != access.RoleAdmin {
		t.Errorf("root: %+v, %v", p, err)
	}
	n := newNode(t)
	n.do("GET", "/v1/keys", nil).ok(200)
}

// TestKeyRoutes: keys are made, listed and revoked by admins, through the client;
// a revoked one is cut off in the middle of a stream.
func TestKeyRoutes(t *testing.T) {
	n := newNode(t)
	n.setUp()
	n.claim("a")
	c, ctx := n.newClient(), t.Context()
	made := managertest.Must(c.CreateKey(ctx, rest.KeyCreate{Name: "ci", Role: rest.RoleUser, Namespaces: []string{"default"}, Lifetime: "1h"}))(t)
	if made.Key.Expires == nil || made.Text == "" {
		t.Errorf("%+v", made)
	}
	list := managertest.Must(c.Keys(ctx))(t)
	if len(list) != 1 || list[0].Id != made.Key.Id || list[0].Name != "ci" {
		t.Errorf("%+v", list)
	}
	if body := n.do("GET", "/v1/keys", nil).ok(200).body; bytes.Contains(body, []byte(made.Text)) || bytes.Contains(body, []byte("digest")) {
		t.Errorf("%s", body)
	}
	user, err := client.New(client.Config{Socket: n.socket, Key: made.Text})
	if err != nil {
		t.Fatal(err)
	}
	defer user.Close()
	if _, err := user.Keys(ctx); !client.HasCode(err, rest.ErrorCodePermissionDenied) {
		t.Errorf("%v", err)
	}
	began := false
	_, err = user.Stream(ctx, "a", rest.ExecRequest{Shell: "echo; exec sleep 1000"}, client.Output{Stdout: writeFunc(func() error {
		began = true
		return c.RevokeKey(ctx, made.Key.Id)
	})})
	if !began || err == nil {
		t.Errorf("%v, %v", began, err)
	}
	if _, err := user.Version(ctx); !client.HasCode(err, rest.ErrorCodeUnauthenticated) {
		t.Errorf("%v", err)
	}
	for body, says := range map[string]string{
		`{"name":"x","role":"root","namespaces":["a"]}`: "role", `{"name":"x","role":"user"}`: "namespaces", `{"role":"user","namespaces":["a"]}`: "name",
		`{"name":"x","role":"user","namespaces":["../a"]}`: "namespaces", `{"name":"x","role":"user","namespaces":["a"],"lifetime":"soon"}`: "lifetime",
		`{"name":"../x","role":"user","namespaces":["a"]}`: "name", `{"name":"x","role":"user","namespaces":["a"],"text":"ar_mine"}`: "text",
		`{"name":"x","role":"user","namespaces":["a\u0000"]}`: "NUL", `{"name":"x","role":"admin","namespaces":["a"]}`: "admin",
	} {
		if e := n.do("POST", "/v1/keys", body).refused(400, "invalid"); !strings.Contains(e.Message, says) {
			t.Errorf("%s: %+v", body, e)
		}
	}
	n.do("DELETE", "/v1/keys/aaaaaaaaaaaa", nil).refused(404, "not_found")
	n.do("DELETE", "/v1/keys/x", nil).refused(400, "invalid")
}

// TestRevokedSocket: a terminal that is open ends with the key that opened it.
func TestRevokedSocket(t *testing.T) {
	n := newNode(t)
	n.setUp()
	path := n.claim("a") + "/execs"
	text, k, err := n.Access.Create(access.KeySpec{Name: "u", Role: access.RoleUser, Namespaces: []sandbox.Namespace{"default"}})
	if err != nil {
		t.Fatal(err)
	}
	u := n.with(text)
	x := as[rest.ExecStarted](u.do("POST", path, rest.ExecRequest{Argv: []string{"cat"}, OpenStdin: true, Background: true}).ok(201))
	conn, _, err := websocket.Dial(t.Context(), "ws://node"+path+"/"+x.Id+"/socket", &websocket.DialOptions{HTTPClient: u.client})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.CloseNow()
	if _, data, err := conn.Read(t.Context()); err != nil || !bytes.Contains(data, []byte("started")) {
		t.Fatalf("%s, %v", data, err)
	}
	if err := n.Access.Revoke(k.ID); err != nil {
		t.Fatal(err)
	}
	if _, data, err := conn.Read(t.Context()); err == nil {
		t.Errorf("it goes on: %s", data)
	}
	// Programs that it started are the sandbox's.
	if i := as[rest.ExecInfo](n.do("GET", path+"/"+x.Id, nil).ok(200)); !i.Running {
		t.Errorf("%+v", i)
	}
}

type writeFunc func() error

func (f writeFunc) Write(p []byte) (int, error) { return len(p), f() }

// TestAudit: the log has the request, its principal and its result, but no
// content of the request.
func TestAudit(t *testing.T) {
	n := newNode(t)
	n.setUp()
	text, k, err := n.Access.Create(access.KeySpec{Name: "u", Role: access.RoleUser, Namespaces: []sandbox.Namespace{"default"}})
	if err != nil {
		t.Fatal(err)
	}
	u := n.with(text)
	s := as[rest.Sandbox](u.do("POST", v1+"/sandboxes", rest.SandboxCreate{Pool: "pool", Env: rest.Env{"E": "classified"}}, "X-Request-Id", "claim").ok(201))
	u.do("POST", v1+"/sandboxes/"+s.Name+"/execs", rest.ExecRequest{Shell: "echo classified"}, "X-Request-Id", "exec").ok(200)
	u.do("GET", v1+"/sandboxes/"+s.Name+"/files/stat?path=/classified", nil, "X-Request-Id", "stat").refused(404, "file_not_found")
	u.do("GET", v1+"/sandboxes", nil, "X-Request-Id", "list").ok(200)
	u.do("GET", "/v1/keys", nil, "X-Request-Id", "keys").refused(403, "permission_denied")
	u.do("GET", "/v1/namespaces/other/pools/x", nil, "X-Request-Id", "other").refused(404, "not_found")
	n.with("ar_classified").do("GET", v1+"/pools/pool", nil, "X-Request-Id", "stranger").refused(401, "unauthenticated")
	n.with(s.Token).do("DELETE", v1+"/sandboxes/"+s.Name, nil, "X-Request-Id", "token").refused(403, "permission_denied")
	n.do("GET", "/v1/keys", nil, "X-Request-Id", "root").ok(200)
	n.do("DELETE", "/v1/keys/"+string(k.ID), nil, "X-Request-Id", "revoke").ok(204)
	u.do("POST", v1+"/sandboxes", rest.SandboxCreate{Pool: "pool"}, "X-Request-Id", "revoked").refused(401, "unauthenticated")

	who, object := "key:"+string(k.ID), "sandboxes/"+s.Name
	start := func(e audit.Event) audit.Event { e.Stage, e.Code = audit.Start, 0; return e }
	var want []audit.Event
	for _, e := range []audit.Event{
		{Request: "claim", Principal: who, Verb: "createSandbox", Namespace: "default", Object: object, Code: 201},
		{Request: "exec", Principal: who, Verb: "exec", Namespace: "default", Object: object, Code: 200},
		{Request: "stat", Principal: who, Verb: "statFile", Namespace: "default", Object: object, Code: 404},
		{Request: "keys", Principal: who, Verb: "listKeys", Code: 403},
		{Request: "other", Principal: who, Verb: "getPool", Namespace: "other", Object: "pools/x", Code: 404},
		{Request: "stranger", Verb: "getPool", Namespace: "default", Object: "pools/pool", Code: 401},
		{Request: "token", Principal: "sandbox:" + s.Id, Verb: "deleteSandbox", Namespace: "default", Object: object, Code: 403},
		{Request: "root", Principal: "uid:0", Verb: "listKeys", Code: 200},
		{Request: "revoke", Principal: "uid:0", Verb: "revokeKey", Object: "keys/" + string(k.ID), Code: 204},
		{Request: "revoked", Verb: "createSandbox", Namespace: "default", Code: 401},
	} {
		e.Stage, e.Remote = audit.End, "unix"
		if slices.Contains([]string{"claim", "exec", "stat", "root", "revoke"}, e.Request) {
			want = append(want, start(e))
		}
		want = append(want, e)
	}
	for i := range want { // a name that is made up is unknown before
		if want[i].Request == "claim" && want[i].Stage == audit.Start {
			want[i].Object = ""
		}
	}
	last := func() []audit.Event {
		all := n.Events()
		return slices.DeleteFunc(all, func(e audit.Event) bool { return len(e.Request) > 20 }) // those of setUp
	}
	n.Eventually(func() bool { return len(last()) >= len(want) }) // the end comes after the answer
	got := last()
	slices.SortStableFunc(got, func(a, b audit.Event) int {
		at := func(r string) int { return slices.IndexFunc(want, func(e audit.Event) bool { return e.Request == r }) }
		return at(a.Request) - at(b.Request)
	})
	for i, e := range got {
		if e.Time.IsZero() {
			t.Errorf("%+v has no time", e)
		}
		e.Time = time.Time{}
		if i >= len(want) || e != want[i] {
			t.Errorf("%+v", e)
		}
	}
	data, err := os.ReadFile(filepath.Join(n.TrailDir, "audit.log"))
	if err != nil || bytes.Contains(data, []byte("classified")) || bytes.Contains(data, []byte(text)) || bytes.Contains(data, []byte("ars_")) {
		t.Errorf("%s, %v", data, err)
	}
}

// TestRefusedAreBounded: a key cannot write a line into the audit log for each of its
// many refused requests; those of another are written.
func TestRefusedAreBounded(t *testing.T) {
	n := newNode(t)
	loud, quiet := n.with(n.key(access.RoleViewer, "default")), n.with(n.key(access.RoleViewer, "default"))
	const flood = 300
	for range flood {
		loud.do("DELETE", v1+"/pools/pool", nil, "X-Request-Id", "loud").refused(403, "permission_denied")
	}
	quiet.do("DELETE", v1+"/pools/pool", nil, "X-Request-Id", "quiet").refused(403, "permission_denied")
	wrote := func() map[string]int {
		out := map[string]int{}
		for _, e := range n.Events() {
			out[e.Request]++
		}
		return out
	}
	n.Eventually(func() bool { return wrote()["quiet"] == 1 }) // the end comes after the answer
	if all := wrote(); all["loud"] < 90 || all["loud"] == flood {
		t.Errorf("%v", all)
	}
}

// TestAuditFails: a request that belongs into the log and cannot be recorded is
// not done.
func TestAuditFails(t *testing.T) {
	var broken atomic.Bool // the end of a request is written when it has been answered
	n := newNode(t, func(c *Config) {
		below := c.Audit
		c.Audit = managertest.Auditor(func(e audit.Event) error {
			if broken.Load() {
				return managertest.FullDisk(e)
			}
			return below.Write(e)
		})
	})
	n.setUp()
	n.claim("a")
	broken.Store(true)
	operations(n.spec, func(method, path string, op *openapi3.Operation, _ *openapi3.PathItem) {
		res := n.attempt(method, path, "{name}", "a")
		if routes[method+" "+path].Rule().Audited() {
			res.refused(503, "audit_failed")
		} else if res.status == 503 && strings.Contains(string(res.body), "audit") {
			t.Errorf("%s only looks: %s", op.OperationID, res.body)
		}
	})
	broken.Store(false)
	n.do("DELETE", v1+"/sandboxes/a", nil).ok(200)
}
