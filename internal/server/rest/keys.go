package rest

import (
	"net/http"

	"agentrun.dev/api/rest"
	"agentrun.dev/internal/access"
	"agentrun.dev/internal/convert/restconv"
	"agentrun.dev/internal/server"
)

// ListKeys implements rest.ServerInterface.
func (a *api) ListKeys(w http.ResponseWriter, r *http.Request) {
	list := rest.KeyList{Items: []rest.Key{}}
	for _, k := range a.Access.Keys() {
		list.Items = append(list.Items, showKey(k))
	}
	a.answer(w, r, http.StatusOK, list, nil)
}

// CreateKey implements rest.ServerInterface.
func (a *api) CreateKey(w http.ResponseWriter, r *http.Request) {
	out, err := func() (out rest.KeyCreated, err error) {
		var given rest.KeyCreate
		if _, err := a.readJSON(w, r, server.MaxBody, &given); err != nil {
			return out, err
		}
		spec := access.KeySpec{Name: given.Name, Role: access.Role(given.Role)}
		if spec.Namespaces, err = access.ParseNamespaces(given.Namespaces); err != nil {
			return out, err
		}
		if spec.Lifetime, err = restconv.ToDuration("lifetime", given.Lifetime); err != nil {
			return out, err
		}
		text, k, err := a.Access.Create(spec)
		if err != nil {
			return out, err
		}
		made(r, "keys/"+string(k.ID))
		return rest.KeyCreated{Text: text, Key: showKey(k)}, nil
	}()
	a.answer(w, r, http.StatusCreated, out, err)
}

// RevokeKey implements rest.ServerInterface.
func (a *api) RevokeKey(w http.ResponseWriter, r *http.Request, id string) {
	k, err := access.ParseKeyID(id)
	if err == nil {
		err = a.Access.Revoke(k)
	}
	a.done(w, r, err)
}

func showKey(k access.Key) rest.Key {
	out := rest.Key{Id: string(k.ID), Name: k.Name, Role: rest.Role(k.Role), Created: k.Created, Expires: restconv.FromTime(k.Expires)}
	for _, n := range k.Namespaces {
		out.Namespaces = append(out.Namespaces, string(n))
	}
	return out
}
