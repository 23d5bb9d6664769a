# What the scripts share that run tests in machines of their own; sourced, not run. It sets here,
# tree, site (a folder for what the machine gets to see, gone at the end) and failed, and has
# in_machine. The programs are built by whoever calls; root, or sudo, is for the machine alone.
# shellcheck shell=bash
set -euo pipefail
umask 022

here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P)
tree=$(cd "$here/../../.." && pwd -P)
say() { printf '%s\n' "machine tests: $*" >&2; }
cd "$tree"

export CGO_ENABLED=0 GOFLAGS="${GOFLAGS:--buildvcs=false}"
module=$(go list -m)

as_root=()
if [ "$(id -u)" -ne 0 ]; then
	command -v sudo >/dev/null || { say "run this as root, or with sudo installed: the machine needs it" && exit 1; }
	as_root=(sudo)
	[ -t 0 ] || as_root=(sudo -n)
fi

site=$(mktemp -d /tmp/agentconnect-machine-tests.XXXXXX)
chmod 0755 "$site"
failed=0
running=
cleanup() {
	trap - EXIT INT TERM HUP
	if [ -n "$running" ]; then
		kill -TERM -- "-$running" 2>/dev/null || true
		wait "$running" || true
	fi
	rm -rf "$site" "$site.out"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# apart runs a command in a group of its own, which ends with this script: bash runs no trap while
# it waits for a command in the foreground. Not as an ordinary user, who may not signal sudo.
apart() {
	local code=0
	if [ "$(id -u)" -ne 0 ]; then
		"$@" </dev/null
		return
	fi
	set -m
	"$@" </dev/null &
	running=$!
	set +m
	wait "$running" || code=$?
	running=
	return "$code"
}

# install_product: the programs and units below $site/root, as the package would.
install_product() {
	local libexec=$site/root/usr/libexec/agentconnect-sandbox version=$module/cmd/internal/version.Version
	mkdir -p "$site/root/usr/bin" "$site/root/usr/lib/systemd/user" "$libexec"
	go build -trimpath -ldflags "-s -w -X $version=new" -o "$site/root/usr/bin/" ./cmd/agentconnect
	go build -trimpath -ldflags "-s -w -X $version=new" -o "$libexec/" ./cmd/agentconnect-supervisor ./cmd/agentconnect-launch ./cmd/agentconnect-guest
	cp packaging/systemd/user/* "$site/root/usr/lib/systemd/user/"
}

shown() { "$@" | tee "$site.out"; }

# in_machine PACKAGE@NAME EVENTS MACHINE-SCRIPT [OPTION]… -- COMMAND [ARG]…: runs a test program
# in a machine. With a file for its events it prints nothing of the tests; cmd/internal/testrun
# reads them. Without, it prints what `go test -v` prints. A skipped test is a failure: the
# machine has everything.
in_machine() {
	local label=$1 events=$2 began=$SECONDS code=0 skipped
	shift 2
	say "$label"
	if [ -n "$events" ]; then
		apart go tool test2json -t -p "$module/$label" ${as_root[@]+"${as_root[@]}"} "$@" -test.v=test2json >>"$events" || code=$?
		skipped=$(grep -c '"Action":"skip"' "$events" || true)
	else
		apart shown ${as_root[@]+"${as_root[@]}"} "$@" -test.v || code=$?
		skipped=$(grep -c -- '--- SKIP' "$site.out" || true)
		rm -f "$site.out"
	fi
	if [ "$code" -eq 0 ] && [ "$skipped" -gt 0 ]; then
		say "a test was skipped, and nothing is missing in the machine"
		code=1
	fi
	say "$label: exit code $code after $((SECONDS - began)) s"
	[ "$code" -eq 0 ] || failed=1
}
