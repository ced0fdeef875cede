// Package rest is the REST API. Its types, routes and client are generated from
// api/openapi.yaml.
package rest

//go:generate go run github.com/oapi-codegen/oapi-codegen/v2/cmd/oapi-codegen@v2.8.1 --config config.yaml ../openapi.yaml
