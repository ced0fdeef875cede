package rest

import (
	"net/http"
	"strings"
	"testing"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/access"
)

// TestPortsOfOthers: neither by path nor by host name does a key of another
// namespace, or the token of another sandbox, reach a port or learn that the
// sandbox exists; nor do they get a terminal. Viewers are refused.
func TestPortsOfOthers(t *testing.T) {
	n := newNode(t, withDomain)
	n.setUp()
	at := n.claim("target")
	n.claim("other")
	id := as[rest.Sandbox](n.do("GET", at, nil).ok(200)).Id
	port := program(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("inside")) })
	unknown := "aaaaaaaaaaaaaaaaaaaa"
	ask := func(first, host, credential string) (int, string) {
		t.Helper()
		res := n.raw("GET " + first + " HTTP/1.1\nHost: " + host + "\nAuthorization: Bearer " + credential)
		return res.StatusCode, bodyOf(t, res)
	}
	byPath := func(name string) string { return v1 + "/sandboxes/" + name + "/ports/" + port + "/" }
	byHost := func(id string) string { return port + "-" + id + "." + domain }
	for who, credential := range map[string]string{
		"a user": n.key(access.RoleUser, "default"), "an admin": n.key(access.RoleAdmin), "the sandbox's token": n.token("target"),
	} {
		for _, to := range [][2]string{{byPath("target"), "node"}, {"/", byHost(id)}} {
			if status, body := ask(to[0], to[1], credential); status != 200 || body != "inside" {
				t.Errorf("%s at %s: %d %s", who, to, status, body)
			}
		}
	}
	for who, credential := range map[string]string{
		"another tenant": n.key(access.RoleUser, "mine"), "another sandbox's token": n.token("other"),
	} {
		for _, to := range []struct{ path, host, nobody, nohost, name, noname string }{
			{byPath("target"), "node", byPath("nobody"), "node", "target", "nobody"},
			{"/", byHost(id), "/", byHost(unknown), id, unknown},
		} {
			status, body := ask(to.path, to.host, credential)
			nothing, about := ask(to.nobody, to.nohost, credential)
			if status != 404 || nothing != 404 || strings.ReplaceAll(body, to.name, to.noname) != about || strings.Contains(body, "target") && to.name == id {
				t.Errorf("%s at %s: %d %s; for nothing %d %s", who, to.path, status, body, nothing, about)
			}
		}
		n.with(credential).do("POST", at+"/terminal", rest.TerminalRequest{}).refused(404, "not_found")
		n.with(credential).do("GET", at+"/tunnels/"+port, nil).refused(404, "not_found")
	}
	viewer := n.key(access.RoleViewer, "default")
	for _, to := range [][2]string{{byPath("target"), "node"}, {"/", byHost(id)}} {
		if status, body := ask(to[0], to[1], viewer); status != 403 {
			t.Errorf("a viewer at %s: %d %s", to, status, body)
		}
	}
	n.with(viewer).do("POST", at+"/terminal", rest.TerminalRequest{}).refused(403, "permission_denied")
	var used int
	for _, e := range n.Events() {
		if e.Verb == "usePort" && e.Object == "sandboxes/target/ports/"+port && e.Namespace == "default" && e.Code == 200 {
			used++
		}
	}
	if used == 0 {
		t.Errorf("the audit log has no use of the port: %+v", n.Events())
	}
}
