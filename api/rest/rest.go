// Package rest is the REST API as api/openapi.yaml describes it: types, routes
// and a client, generated.
package rest

//go:generate go run github.com/oapi-codegen/oapi-codegen/v2/cmd/oapi-codegen@v2.8.1 --config config.yaml ../openapi.yaml
