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
# Where Go's own installer puts it: sudo drops what a user added to PATH.
export PATH := $(PATH):/usr/local/go/bin

enter := packaging/dev/enter.sh
go_dirs := cmd dbusctl sandbox units
programs := agentconnect agentconnect-supervisor agentconnect-launch agentconnect-guest agentconnect-bench

export GOFLAGS ?= -buildvcs=false
AC_VERSION ?= $(shell git -c safe.directory='*' describe --tags --always --dirty 2>/dev/null || echo dev)
bin ?= bin
native ?= bin/native
GO_BUILDMODE ?=
ldflags := -s -w -X agentconnect.md/sandbox/cmd/internal/version.Version=$(AC_VERSION)
FUZZTIME ?= 10s
PKG ?=
RUN ?=
MACHINES ?=
BENCH ?=

# Packages whose concurrency is the point run under the race detector.
raced := cmd/internal/acp,cmd/internal/daemon,cmd/internal/rest,cmd/internal/supervisor

.PHONY: build pages install install-files dist deb repo test-deb test-apparmor run test test-attack test-races test-soak test-systemd test-product test-chaos test-limits lint bench bench-guard fuzz cross fmt clean runtimes \
	here-run here-test here-attack here-races here-soak here-check here-bench here-guard here-fuzz here-cross

build: ## the programs into bin/, static (but with GO_BUILDMODE=pie, as the package has them)
	CGO_ENABLED=0 go build -trimpath $(addprefix -buildmode=,$(GO_BUILDMODE)) -ldflags '$(ldflags)' -o $(bin)/ $(addprefix ./cmd/,$(programs))

# The pages of commands and the completions come out of the program itself. A program for
# another machine cannot be asked here: then one for this machine is built into $(native).
pages: build ## man pages and shell completions, into bin/man and bin/completions
	@teller=$(bin)/agentconnect; \
	if [ "$$(go env GOOS)/$$(go env GOARCH)" != "$$(go env GOHOSTOS)/$$(go env GOHOSTARCH)" ]; then \
		GOOS=$$(go env GOHOSTOS) GOARCH=$$(go env GOHOSTARCH) CGO_ENABLED=0 go build -trimpath -ldflags '$(ldflags)' -o $(native)/ ./cmd/agentconnect; \
		teller=$(native)/agentconnect; \
	fi; \
	rm -rf $(bin)/man $(bin)/completions; \
	mkdir -p $(bin)/man $(bin)/completions; \
	cp packaging/man/* $(bin)/man/; \
	"$$teller" man $(bin)/man; \
	for shell in bash zsh fish; do "$$teller" completion $$shell >$(bin)/completions/$$shell; done

install: build pages install-files ## all of it below DESTDIR, where the units expect it

install-files: # what is built already
	install -d $(addprefix $(DESTDIR)/usr/,bin libexec/agentconnect-sandbox lib/systemd/user share/agentconnect-sandbox/apparmor share/man/man1 share/man/man5 share/man/man7 \
		share/bash-completion/completions share/zsh/vendor-completions share/fish/vendor_completions.d share/doc/agentconnect-sandbox)
	install -m 0755 $(bin)/agentconnect $(DESTDIR)/usr/bin/
	install -m 0755 $(bin)/agentconnect-supervisor $(bin)/agentconnect-launch $(bin)/agentconnect-guest $(DESTDIR)/usr/libexec/agentconnect-sandbox/
	install -m 0644 packaging/systemd/user/* $(DESTDIR)/usr/lib/systemd/user/
	install -m 0644 packaging/apparmor/* $(DESTDIR)/usr/share/agentconnect-sandbox/apparmor/
	for section in 1 5 7; do install -m 0644 $(bin)/man/*.$$section $(DESTDIR)/usr/share/man/man$$section/; done
	install -m 0644 $(bin)/completions/bash $(DESTDIR)/usr/share/bash-completion/completions/agentconnect
	install -m 0644 $(bin)/completions/zsh $(DESTDIR)/usr/share/zsh/vendor-completions/_agentconnect
	install -m 0644 $(bin)/completions/fish $(DESTDIR)/usr/share/fish/vendor_completions.d/agentconnect.fish
	install -m 0644 README.md docs/*.md $(DESTDIR)/usr/share/doc/agentconnect-sandbox/
	umask 022 && cp -R --no-preserve=mode,ownership packaging/examples $(DESTDIR)/usr/share/doc/agentconnect-sandbox/

run:
	@$(enter) run $(MAKE) --no-print-directory here-run

test: ## those on real systemd, as root or with sudo, and all others
	@packaging/dev/test.sh

# How many attacks must be refused inside that work outside.
ATTACKS := 178

test-attack: ## every attack inside the boundary and outside, as a table
	@$(enter) run $(MAKE) --no-print-directory here-attack

test-soak: ## five minutes of 1,000 agents that a control plane changes while its connection drops; AGENTCONNECT_TEST_SOAK=1h is longer
	@$(enter) run $(MAKE) --no-print-directory here-soak

test-races: ## 1,000 changes of a sealed configuration, 100 commands beside links that are swapped, 200 kills of each kind
	@$(enter) run $(MAKE) --no-print-directory here-races

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

# ---- the Debian package ----

dist: ## dist/agentconnect-sandbox_VERSION.tar.xz, with the vendored modules
	@packaging/deb/dist.sh

deb: ## dist/*.deb: the package, built offline from the tarball; ARCH=arm64 for another machine
	@packaging/deb/build.sh $(if $(ARCH),-a $(ARCH))

repo: ## dist/repo: a signed apt repository of dist/*.deb; KEY=FINGERPRINT signs with a key of yours
	@packaging/deb/repo.sh $(if $(KEY),-k $(KEY)) dist/repo dist/*.deb

test-deb: ## the package: built, checked, installed, upgraded and removed in clean machines
	@packaging/dev/deb/test.sh $(SUITES)

test-apparmor: ## the package's AppArmor profile on a kernel that has AppArmor: emulated, slow
	@packaging/dev/deb/test.sh -a

lint:
	@$(enter) lint packaging/dev/lint.sh

bench: ## everything beside its peers, into docs/bench.md; BENCH="-only network" measures a part and prints it
	@packaging/dev/bench.sh $(BENCH)

bench-guard: ## a few ratios beside those last accepted; fails on a clear step back
	@$(enter) run $(MAKE) --no-print-directory here-guard

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

here-attack: build
	@go run ./cmd/internal/demo -bin bin -attacks $(ATTACKS)

here-soak:
	AGENTCONNECT_TEST_SOAK=$${AGENTCONNECT_TEST_SOAK:-5m} go test -count=1 -v -timeout 0 -run '^TestSoak$$' ./cmd/internal/placement

# CI runs the same with fewer rounds: 50, 8 and 48.
here-races:
	AGENTCONNECT_TEST_RACES=1 go test -count=1 -v -timeout 60m -run 'NothingThatA|AreSwapped|KilledAtAnyMoment' ./cmd/internal/e2e ./cmd/internal/launch

here-check:
	@unformatted=$$(gofmt -l $(go_dirs)); \
	if [ -n "$$unformatted" ]; then printf 'not formatted; run make fmt:\n%s\n' "$$unformatted" >&2; exit 1; fi
	go vet ./...

here-test: build here-check
	@packaging/dev/npm-runtimes.sh >/dev/null
	@packaging/dev/npm-peer.sh >/dev/null
	go run ./cmd/internal/testrun -race '$(raced)' -must packaging/dev/must-run.txt -machines '$(MACHINES)' \
		-run '$(RUN)' $(if $(PKG)$(RUN),,-fuzz $(FUZZTIME)) $(PKG)
	@if [ -z '$(PKG)$(RUN)' ]; then $(MAKE) --no-print-directory here-attack; fi

here-fuzz:
	go run ./cmd/internal/testrun -only-fuzz -fuzz $(FUZZTIME) $(PKG)

here-bench: build
	AGENTCONNECT_BENCH_SRT=$$(packaging/dev/npm-peer.sh || true) bin/agentconnect-bench $(BENCH)

here-guard: build
	bin/agentconnect-bench -pairs 30 -guard packaging/dev/bench-accepted.json

# vet compiles the tests, too.
here-cross:
	@for platform in linux/amd64 linux/arm64 darwin/arm64; do \
		export GOOS=$${platform%/*} GOARCH=$${platform#*/} CGO_ENABLED=0; \
		printf 'cross: %s\n' "$$platform"; \
		go build -trimpath ./... && go vet ./... || exit 1; \
	done
