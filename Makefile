# AgentRun. `make` alone lists the targets. What is not a one-liner is in scripts/.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

BUILD := $(CURDIR)/build
export AGENTRUN_ASSETS := $(BUILD)
export GOLANGCI_VERSION := v2.14.0

FUZZTIME ?= 5m
BENCH ?= .
BENCHTIME ?= 1s

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## all programs, the guest kernel and the test guest, into build/
	@scripts/build.sh

.PHONY: install
install: ## what make build has made, into PREFIX (/usr) under DESTDIR
	@scripts/install.sh

.PHONY: docs
docs: ## the reference of the REST API, from its description
	@go run ./scripts/apidoc api/openapi.yaml >docs/api-reference.md

.PHONY: transcript
transcript: ## run a first session and write it down (docs/transcript.md)
	@scripts/transcript.sh

.PHONY: demo
demo: ## build what is missing, run sandboxes, fork a warm Python (ENGINE=microvm|gvisor)
	@scripts/demo.sh

.PHONY: test
test: ## everything: static checks, tests on the host, tests with microVMs
	@scripts/test.sh

.PHONY: soak
soak: ## make test with full counts
	@AGENTRUN_SOAK=1 scripts/test.sh

.PHONY: testbed
testbed: ## start the emulated machine with AMD-V
	@scripts/testbed.sh
	@$(BUILD)/testbed status
	@echo "make shell: a shell in it; build/testbed exec CMD: a command; build/testbed stop: end it"

.PHONY: shell
shell: ## a shell in the emulated machine
	@scripts/testbed.sh
	@$(BUILD)/testbed shell

.PHONY: lint
lint: ## golangci-lint, fetched and built on first use
	@scripts/lint.sh

.PHONY: words
words: ## words in comments that hide the actor, per package (scripts/words)
	@go run ./scripts/words

.PHONY: fuzz
fuzz: ## every fuzz test for FUZZTIME (5m)
	@FUZZTIME=$(FUZZTIME) scripts/fuzz.sh

.PHONY: bench
bench: ## the benchmarks matching BENCH (.), those with microVMs included
	@BENCH='$(BENCH)' BENCHTIME=$(BENCHTIME) scripts/bench.sh

.PHONY: bench-peers
bench-peers: ## AgentRun beside microsandbox and, with FIRECRACKER=PATH, Firecracker
	@scripts/bench-peers.sh

.PHONY: cover
cover: ## statement coverage of the tests on the host, per package
	@scripts/cover.sh

.PHONY: clean
clean: ## stop the emulated machine and remove build/ (the cache stays)
	@if [ -x $(BUILD)/testbed ]; then $(BUILD)/testbed stop || true; fi
	@rm -rf $(BUILD)
