# The build, the tests, and the demonstration.
#
#	make run     a real agent turn inside the boundary: what it could reach, what it could not
#	make test    the tests, those on real systemd in machines of their own
#
# Both install what they need (apt-get; as root, or with sudo) and never run an agent as root:
# started by root, they use the ordinary user agentconnect-dev and a copy of this tree below
# that user's home. See packaging/dev/enter.sh.
#
# PKG=./sandbox/... and RUN=TestName narrow `make test`; FUZZTIME=60s lengthens the fuzz runs.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

enter := packaging/dev/enter.sh
go_dirs := cmd dbusctl sandbox units
programs := agentconnect agentconnect-supervisor agentconnect-launch agentconnect-guest agentconnect-bench

export GOFLAGS ?= -buildvcs=false
AC_VERSION ?= $(shell git -c safe.directory='*' describe --tags --always --dirty 2>/dev/null || echo dev)
ldflags := -s -w -X agentconnect.md/sandbox/cmd/internal/version.Version=$(AC_VERSION)
FUZZTIME ?= 10s
PKG ?=
RUN ?=
MACHINES ?=
BENCH ?=

# Packages whose concurrency is the point run under the race detector.
raced := cmd/internal/acp,cmd/internal/daemon,cmd/internal/supervisor

.PHONY: build install run test test-systemd test-product test-chaos test-limits lint bench fuzz cross fmt clean runtimes \
	here-run here-test here-check here-bench here-fuzz here-cross

build: ## the programs, static, into bin/
	CGO_ENABLED=0 go build -trimpath -ldflags '$(ldflags)' -o bin/ $(addprefix ./cmd/,$(programs))

install: build ## programs and user units below DESTDIR, where the units expect them
	install -d $(DESTDIR)/usr/bin $(DESTDIR)/usr/libexec/agentconnect-sandbox $(DESTDIR)/usr/lib/systemd/user
	install -m 0755 bin/agentconnect $(DESTDIR)/usr/bin/
	install -m 0755 bin/agentconnect-supervisor bin/agentconnect-launch bin/agentconnect-guest $(DESTDIR)/usr/libexec/agentconnect-sandbox/
	install -m 0644 packaging/systemd/user/* $(DESTDIR)/usr/lib/systemd/user/

run:
	@$(enter) run $(MAKE) --no-print-directory here-run

test: ## those on real systemd, as root or with sudo, and all others
	@packaging/dev/test.sh

# On real systemd alone, in machines of their own. SUITES="bookworm trixie" for both releases.
machines := packaging/dev/systemd
SUITES ?= bookworm
chaotic := ^TestChaos$$$$
on_suites = @for suite in $(SUITES); do $(1) || exit 1; done
test-systemd: ## the units and the bus
	$(call on_suites,$(machines)/test.sh -s $$suite)

test-product: ## the installed product: life cycle by either hand, adoption, fail-closed order, kills of everything
	$(call on_suites,$(machines)/product.sh -s $$suite -x '$(chaotic)')

test-chaos: ## random kills, stops and restarts; AGENTCONNECT_TEST_CHAOS=300s makes it longer
	$(call on_suites,$(machines)/product.sh -s $$suite -p user -r '$(chaotic)')

test-limits: ## real memory, cpu and task limits, under user-mode Linux
	$(call on_suites,$(machines)/limits-test.sh -s $$suite)

lint:
	@$(enter) lint packaging/dev/lint.sh

bench:
	@$(enter) run $(MAKE) --no-print-directory here-bench

fuzz:
	@$(enter) run $(MAKE) --no-print-directory here-fuzz

cross:
	@$(enter) lint $(MAKE) --no-print-directory here-cross

runtimes: ## the ACP runtimes from npm that the tests use
	@$(enter) test packaging/dev/npm-runtimes.sh

fmt:
	gofmt -w $(go_dirs)

clean:
	rm -rf bin

# ---- what the targets above do once an ordinary user does it ----

here-run: build
	@go run ./cmd/internal/demo -bin bin

here-check:
	@unformatted=$$(gofmt -l $(go_dirs)); \
	if [ -n "$$unformatted" ]; then printf 'not formatted; run make fmt:\n%s\n' "$$unformatted" >&2; exit 1; fi
	go vet ./...

here-test: build here-check
	@packaging/dev/npm-runtimes.sh >/dev/null
	go run ./cmd/internal/testrun -race '$(raced)' -must packaging/dev/must-run.txt -machines '$(MACHINES)' \
		-run '$(RUN)' $(if $(PKG)$(RUN),,-fuzz $(FUZZTIME)) $(PKG)

here-fuzz:
	go run ./cmd/internal/testrun -only-fuzz -fuzz $(FUZZTIME) $(PKG)

here-bench: build
	bin/agentconnect-bench $(BENCH)

# vet compiles the tests, too.
here-cross:
	@for platform in linux/amd64 linux/arm64 darwin/arm64; do \
		export GOOS=$${platform%/*} GOARCH=$${platform#*/} CGO_ENABLED=0; \
		printf 'cross: %s\n' "$$platform"; \
		go build -trimpath ./... && go vet ./... || exit 1; \
	done
