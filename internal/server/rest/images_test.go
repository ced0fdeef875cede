package rest

import (
	"strings"
	"testing"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/access"
)

// TestRegistryRoutes: credentials are set, listed without the password and deleted; a
// viewer sets none, and no error shows one.
func TestRegistryRoutes(t *testing.T) {
	const canary, path = "password-canary", v1 + "/registries"
	n := newNode(t)
	made := n.do("PUT", path, rest.RegistryCredentials{Registry: "docker.io", Username: "alice", Password: canary}).ok(200)
	if got := as[rest.RegistryLogin](made); got.Registry != "index.docker.io" || got.Username != "alice" || got.Namespace != "default" || strings.Contains(string(made.body), canary) {
		t.Errorf("%s", made.body)
	}
	listed := n.do("GET", path, nil).ok(200)
	if got := as[rest.RegistryLoginList](listed); len(got.Items) != 1 || got.Items[0].Registry != "index.docker.io" || strings.Contains(string(listed.body), canary) {
		t.Errorf("%s", listed.body)
	}
	if got := as[rest.RegistryLoginList](n.do("GET", "/v1/namespaces/other/registries", nil).ok(200)); len(got.Items) != 0 {
		t.Errorf("another namespace has %+v", got)
	}
	viewer := n.with(n.key(access.RoleViewer, "default"))
	viewer.do("GET", path, nil).ok(200)
	viewer.do("PUT", path, rest.RegistryCredentials{Registry: "docker.io", Username: "a", Password: canary}).refused(403, "permission_denied")
	n.with(n.key(access.RoleUser, "other")).do("GET", path, nil).refused(403, "permission_denied")
	for name, body := range map[string]string{
		"another field": `{"` + canary + `": 1}`, "no host": `{"username": "a", "password": "` + canary + `"}`,
		"a path":          `{"registry": "example.com/x", "username": "a", "password": "` + canary + `"}`,
		"a user":          `{"registry": "u@example.com", "username": "a", "password": "` + canary + `"}`,
		"upper case":      `{"registry": "Example.com", "username": "a", "password": "` + canary + `"}`,
		"a bad port":      `{"registry": "example.com:99999", "username": "a", "password": "` + canary + `"}`,
		"an odd address":  `{"registry": "[::ffff:1.2.3.4%25a]", "username": "a", "password": "` + canary + `"}`,
		"no text at all":  `{"registry": "example.com", "username": "a", "password": {"` + canary + `": 1}}`,
		"a name with a :": `{"registry": "example.com", "username": "a:b", "password": "` + canary + `"}`,
	} {
		res := n.do("PUT", path, body)
		res.refused(400, "invalid")
		if strings.Contains(string(res.body), canary) {
			t.Errorf("%s: the answer shows it: %s", name, res.body)
		}
	}
	n.do("DELETE", path, nil).refused(400, "invalid")
	n.do("DELETE", path+"?registry=index.docker.io", nil).ok(204)
	n.do("DELETE", path+"?registry=docker.io", nil).refused(404, "not_found")
}

// TestPublishRoutes: only an admin for all namespaces publishes.
func TestPublishRoutes(t *testing.T) {
	n := newNode(t)
	for _, path := range []string{"/v1/images/publish", "/v1/images/unpublish"} {
		n.do("POST", path, rest.ImageUnpublish{Image: "app:1"}).refused(404, "not_found")
		n.do("POST", path, rest.ImageUnpublish{Image: "a b"}).refused(400, "invalid")
		n.with(n.key(access.RoleUser, "default")).do("POST", path, rest.ImageUnpublish{Image: "app:1"}).refused(403, "permission_denied")
	}
	if got := as[rest.ImageList](n.do("GET", v1+"/images", nil).ok(200)); len(got.Items) != 0 {
		t.Errorf("%+v", got)
	}
}
