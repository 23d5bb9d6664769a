#!/usr/bin/env bash
# Runs the tests of limits and accounting:
#
#	limits-test.sh [-s bookworm|trixie] [-p real|missing] [-r REGEXP] [-l DIR]
#
#	-s  the machine's Debian release (default bookworm: systemd 252; trixie: systemd 257)
#	-p  one part alone: in the machine where limits are real, or in the one whose user manager
#	    has no controllers (default: both)
#	-r  only the tests of that name
#	-l  where the journal and the console go when something fails
#
# Builds the product and the tests into a temporary folder, boots a machine for each part with
# the product installed as the package would, prints what `go test -v` prints, and exits with
# its status; a test that was skipped is a failure. Runs as root.
set -euo pipefail
umask 022

say() { printf '%s\n' "limits tests: $*" >&2; }
here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P)
tree=$(cd "$here/../../.." && pwd -P)

suite=bookworm parts=(real missing) run='' logs=''
while getopts s:p:r:l: opt; do
	case "$opt" in
	s) suite=$OPTARG ;;
	p) parts=("$OPTARG") ;;
	r) run=$OPTARG ;;
	l) logs=$OPTARG ;;
	*) exit 2 ;;
	esac
done
[ "$(id -u)" -eq 0 ] || { say "run this as root" && exit 1; }

site=$(mktemp -d /tmp/agentconnect-limits-tests.XXXXXX)
trap 'rm -rf "$site"' EXIT
chmod 0755 "$site"
libexec=$site/root/usr/libexec/agentconnect-sandbox
mkdir -p "$site/root/usr/bin" "$site/root/usr/lib/systemd/user" "$libexec"
cd "$tree"
export CGO_ENABLED=0 GOFLAGS="${GOFLAGS:--buildvcs=false}"
build() { go build -trimpath -ldflags '-s -w' -o "$1/" "${@:2}"; }
build "$site/root/usr/bin" ./cmd/agentconnect
build "$libexec" ./cmd/agentconnect-supervisor ./cmd/agentconnect-launch ./cmd/agentconnect-guest
cp packaging/systemd/user/* "$site/root/usr/lib/systemd/user/"
go test -c -o "$site/limits.test" ./cmd/internal/limitstest

failed=0
for part in "${parts[@]}"; do
	arguments=(-test.v -test.timeout=20m)
	[ -z "$run" ] || arguments+=(-test.run "$run")
	case "$part" in
	real) machine=limits.sh arguments+=(-test.skip '^TestMissing') ;;
	missing) machine=machine.sh arguments+=(-test.run "${run:-^TestMissing}") ;;
	*) say "no such part: $part" && exit 2 ;;
	esac
	say "$part on $suite"
	began=$SECONDS code=0
	"$here/$machine" -s "$suite" -b "$site" ${logs:+-l "$logs-$part"} -- /opt/test/limits.test "${arguments[@]}" |
		tee "$site.out" || code=$?
	if [ "$code" -eq 0 ] && grep -q -- '--- SKIP' "$site.out"; then
		say "a test was skipped: its reason is above"
		code=1
	fi
	rm -f "$site.out"
	say "$part on $suite: exit code $code after $((SECONDS - began)) s"
	[ "$code" -eq 0 ] || failed=1
done
exit "$failed"
