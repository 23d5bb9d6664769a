#!/usr/bin/env bash
# Runs golangci-lint over the module, in the version that packaging/tools/go.mod pins.
#
# The linter is built from the Go module proxy once and kept below ~/.cache/agentconnect-dev:
# a few minutes on two cores. Its own module keeps its hundreds of dependencies out of ours.
set -euo pipefail

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
tools=$top/packaging/tools
key=$( (cat "$tools/go.mod" "$tools/go.sum" && go env GOVERSION) | sha256sum | cut -c1-16)
bin=${XDG_CACHE_HOME:-$HOME/.cache}/agentconnect-dev/tools/$key
if [ ! -x "$bin/golangci-lint" ]; then
	printf '%s\n' "lint: building golangci-lint into $bin (once)" >&2
	mkdir -p "$bin"
	(cd "$tools" && CGO_ENABLED=0 GOBIN="$bin" go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint)
fi
cd "$top"
# Its lock lies in the temporary directory: there it could be another user's, who has it for good.
mkdir -p "$bin/tmp"
export TMPDIR=$bin/tmp
exec "$bin/golangci-lint" run --timeout 15m "$@" ./...
