package inject

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
)

func host() *Host {
	return &Host{Name: "api.example.org", Credentials: []Credential{
		{Secret: "llm/KEY", Header: "authorization", Format: "Bearer {}", Placeholder: "p.llm.KEY", Value: "sk-1"},
		{Secret: "llm/KEY2", Header: "Authorization", Format: "Bearer {}", Placeholder: "p.llm.KEY2", Value: "sk-2"},
		{Secret: "org/ID", Header: "X-Org", Format: "{}", Placeholder: "p.org.ID", Value: "org-1"},
		{Secret: "gone/K", Header: "X-Gone", Format: "{}", Placeholder: "p.gone.K", Problem: "it was deleted"},
	}}
}

// TestUses: which credentials a request gets, by the placeholders in it.
func TestUses(t *testing.T) {
	for name, c := range map[string]struct {
		header http.Header
		want   string
		fails  string
	}{
		"none":             {http.Header{"Accept": {"a"}}, "", ""},
		"the first":        {http.Header{"Authorization": {"Bearer p.llm.KEY"}}, "Authorization=Bearer sk-1", ""},
		"another secret":   {http.Header{"Authorization": {"Bearer p.llm.KEY2"}}, "Authorization=Bearer sk-2", ""},
		"two headers":      {http.Header{"Authorization": {"Bearer p.llm.KEY"}, "X-Org": {"p.org.ID"}}, "Authorization=Bearer sk-1 X-Org=org-1", ""},
		"a deleted secret": {http.Header{"X-Gone": {"p.gone.K"}}, "", "gone/K: it was deleted"},
		"the wrong header": {http.Header{"X-Org": {"p.llm.KEY"}}, "", `not "p.org.ID"`},
		"a third header":   {http.Header{"X-Else": {"a p.llm.KEY"}}, "", "nothing is put in"},
		"a header's name":  {http.Header{"X-p.llm.KEY": {"a"}}, "", "nothing is put in"},
	} {
		uses, err := host().Uses(Request{Target: "/", Header: c.header})
		var got []string
		for _, u := range uses {
			got = append(got, u.Header+"="+string(u.Value))
		}
		if c.fails != "" {
			if err == nil || !strings.Contains(err.Error(), c.fails) || strings.Contains(err.Error(), "sk-") {
				t.Errorf("%s: %v", name, err)
			}
		} else if err != nil || strings.Join(got, " ") != c.want {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

// TestValueIsHidden: no way of printing or encoding shows a value.
func TestValueIsHidden(t *testing.T) {
	h := host()
	h.Key = "secret-key"
	var log strings.Builder
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "host", h, "value", h.Credentials[0].Value)
	text := fmt.Sprintf("%v %+v %#v %s %q", h, h, *h, h, h.Credentials[0].Value) + log.String()
	if b, err := json.Marshal(h); err == nil {
		t.Errorf("it is JSON: %s", b)
	}
	for _, secret := range []string{"sk-1", "secret-key"} {
		if strings.Contains(text, secret) {
			t.Errorf("%s is shown: %s", secret, text)
		}
	}
}

func TestPrepareRefuses(t *testing.T) {
	for name, hosts := range map[string][]Host{
		"no name":        {{Name: "", Problem: "x"}},
		"an address":     {{Name: "10.0.0.1", Problem: "x"}},
		"upper case":     {{Name: "API.example.org", Problem: "x"}},
		"twice":          {{Name: "a.example", Problem: "x"}, {Name: "a.example", Problem: "x"}},
		"no certificate": {{Name: "a.example"}},
	} {
		if _, err := Prepare(hosts); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}
