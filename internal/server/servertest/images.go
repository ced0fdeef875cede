package servertest

import (
	"fmt"
	"strings"

	"agentrun.dev/internal/sandbox"
)

// images: an image that is not on the node is neither published nor
// unpublished.
func (s *suite) images() {
	if list, err := s.Service.Images(s.ctx, s.namespace, sandbox.Page{}); err != nil || len(list) != 0 {
		s.Errorf("%+v, %v", list, err)
	}
	digest := "sha256:" + strings.Repeat("0", 64)
	for _, image := range []string{"app:1", "registry.example.com/team/app@" + digest, digest} {
		_, err := s.Service.PublishImage(s.ctx, sandbox.PublishRequest{Namespace: s.namespace, Image: image})
		s.missing("publish "+image, err)
		s.missing("unpublish "+image, s.Service.UnpublishImage(s.ctx, image))
	}
	for what, r := range map[string]sandbox.PublishRequest{
		"no image": {}, "a name with a space": {Image: "a b"}, "a long name": {Image: strings.Repeat("a", 2000)},
		"many names": {Image: "app:1", Names: make([]string, 100)}, "a bad name": {Image: "app:1", Names: []string{"a\x00b"}},
	} {
		_, err := s.Service.PublishImage(s.ctx, r)
		s.refused(what, err, sandbox.CodeInvalid)
	}
	s.refused("unpublish nothing", s.Service.UnpublishImage(s.ctx, ""), sandbox.CodeInvalid)
}

// registries: a namespace has credentials for registries, and no answer shows
// them.
func (s *suite) registries() {
	const canary = "password-canary"
	list := func(n sandbox.Namespace) []sandbox.RegistryLogin {
		s.Helper()
		all, err := s.Service.RegistryLogins(s.ctx, n, sandbox.Page{})
		s.must(err)
		return all
	}
	first, err := s.Service.SetRegistryLogin(s.ctx, s.namespace, "registry.example.com:5000", sandbox.RegistryCredentials{Username: "alice", Password: canary})
	s.must(err)
	_, err = s.Service.SetRegistryLogin(s.ctx, s.namespace, "a.example.com", sandbox.RegistryCredentials{Username: "bob", Password: canary})
	s.must(err)
	if first.Namespace != s.namespace || first.Registry != "registry.example.com:5000" || first.Username != "alice" || first.Changed.IsZero() {
		s.Errorf("%+v", first)
	}
	if all := list(s.namespace); len(all) != 2 || all[0].Username != "bob" || !all[1].Changed.Equal(first.Changed) || all[1].Registry != first.Registry {
		s.Errorf("%+v", all)
	}
	if all := list("another"); len(all) != 0 {
		s.Errorf("another namespace has %+v", all)
	}
	if page, err := s.Service.RegistryLogins(s.ctx, s.namespace, sandbox.Page{After: "a.example.com", Limit: 1}); err != nil || len(page) != 1 || page[0].Username != "alice" {
		s.Errorf("%+v, %v", page, err)
	}
	_, err = s.Service.SetRegistryLogin(s.ctx, s.namespace, "a.example.com", sandbox.RegistryCredentials{Username: "carol", Password: "other"})
	s.must(err)
	if all := list(s.namespace); len(all) != 2 || all[0].Username != "carol" || strings.Contains(fmt.Sprintf("%+v %#v", all, all), canary) {
		s.Errorf("%+v", all)
	}
	for what, c := range map[string]sandbox.RegistryCredentials{
		"no name": {Password: canary}, "no password": {Username: "a"}, "a colon": {Username: "a:b", Password: canary},
		"a control character": {Username: "a", Password: canary + "\x00"}, "a long password": {Username: "a", Password: sandbox.Password(strings.Repeat(canary, 2000))},
	} {
		_, err := s.Service.SetRegistryLogin(s.ctx, s.namespace, "a.example.com", c)
		s.refused(what, err, sandbox.CodeInvalid)
		if err != nil && strings.Contains(err.Error(), canary) {
			s.Errorf("%s: the error shows it: %v", what, err)
		}
	}
	s.missing("credentials of another namespace", s.Service.DeleteRegistryLogin(s.ctx, "another", "a.example.com"))
	s.must(s.Service.DeleteRegistryLogin(s.ctx, s.namespace, "a.example.com"))
	s.missing("credentials that are gone", s.Service.DeleteRegistryLogin(s.ctx, s.namespace, "a.example.com"))
	if all := list(s.namespace); len(all) != 1 {
		s.Errorf("%+v", all)
	}
}
