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
	rm -rf "$site" "$site.out" "$site.events" "$site.again"
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

told() {
	local label=$1
	shift
	apart go tool test2json -t -p "$module/$label" ${as_root[@]+"${as_root[@]}"} "$@" -test.v=test2json
}

# failure TESTS EVENTS: what the tests, one a line, printed.
failure() {
	grep -E "\"Test\":\"(${1//$'\n'/|})[\"/]" "$2" | sed -n 's/.*"Output":"\(.*\)"}$/\1/p' | sed 's/\\n$//; s/\\"/"/g; s/\\t/  /g' | tail -n 60
}

# in_machine PACKAGE@NAME EVENTS MACHINE-SCRIPT [OPTION]… -- COMMAND [ARG]…: runs a test program
# in a machine. With a file for its events it prints nothing of the tests; cmd/internal/testrun
# reads them. Without, it prints what `go test -v` prints. A skipped test is a failure: the
# machine has everything. With AGAIN set a few tests that failed run once more, alone, and what
# passes then has passed; that it did not at first is said.
in_machine() {
	local label=$1 events=$2 began=$SECONDS code=0 skipped tests
	shift 2
	say "$label"
	if [ -n "$events" ]; then
		told "$label" "$@" >"$site.events" || code=$?
		if [ "$code" -ne 0 ] && [ -n "${AGAIN:-}" ]; then
			tests=$(sed -n 's/.*"Action":"fail".*"Test":"\([^"/]*\).*/\1/p' "$site.events" | sort -u)
			if [ -n "$tests" ] && [ "$(wc -l <<<"$tests")" -le 4 ] && grep '"Action":"fail"' "$site.events" | grep -qv '"Test":'; then
				say "$label: FAILED ONCE, and run once more: ${tests//$'\n'/ }; what they said:"
				failure "$tests" "$site.events" >&2
				tests=${tests//$'\n'/|}
				code=0
				told "$label" "$@" -test.run "^($tests)\$" >"$site.again" || code=$?
				grep -vE "\"Test\":\"($tests)[\"/]|\"Action\":\"fail\"" "$site.events" >>"$events" || true
				mv "$site.again" "$site.events"
			fi
		fi
		cat "$site.events" >>"$events"
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
