#!/usr/bin/env bash
# Runs the tests of the installed product, in the test machine:
#
#	product.sh [-s bookworm|trixie] [-p user|root] [-r REGEXP] [-x REGEXP] [-b REGEXP] [-l DIR]
#
#	-s  the machine's Debian release (default bookworm: systemd 252; trixie: systemd 257)
#	-p  one part alone: the tests that run as the ordinary user, or those that break the
#	    machine or end the user's session, as root (default: both)
#	-r  only the tests of that name
#	-x  not the tests of that name
#	-b  benchmarks of that name instead of tests
#	-l  where the journal and the console go when something fails
#
# Builds the product and the tests (cmd/internal/machinetest) into a temporary folder, boots a
# machine for each part with the product installed as the package would, prints what
# `go test -v` prints, and exits with its status. AGENTCONNECT_TEST_CHAOS=300s makes the chaos
# longer, AGENTCONNECT_TEST_SEED=N repeats one. Runs as root.
set -euo pipefail
umask 022

say() { printf '%s\n' "product tests: $*" >&2; }
here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P)
tree=$(cd "$here/../../.." && pwd -P)

suite=bookworm parts=(user root) run='' without='' bench='' logs=''
while getopts s:p:r:x:b:l: opt; do
	case "$opt" in
	s) suite=$OPTARG ;;
	p) parts=("$OPTARG") ;;
	r) run=$OPTARG ;;
	x) without=$OPTARG ;;
	b) bench=$OPTARG ;;
	l) logs=$OPTARG ;;
	*) exit 2 ;;
	esac
done
[ "$(id -u)" -eq 0 ] || { say "run this as root" && exit 1; }

site=$(mktemp -d /tmp/agentconnect-product-tests.XXXXXX)
trap 'rm -rf "$site"' EXIT
chmod 0755 "$site"
libexec=$site/root/usr/libexec/agentconnect-sandbox
older=$site/root/usr/libexec/agentconnect-older
mkdir -p "$site/root/usr/bin" "$site/root/usr/lib/systemd/user" "$libexec" "$older"
cd "$tree"
export CGO_ENABLED=0 GOFLAGS="${GOFLAGS:--buildvcs=false}"
version=agentconnect.md/sandbox/cmd/internal/version.Version
build() { go build -trimpath -ldflags "-s -w -X $version=$1" -o "$2/" "${@:3}"; }
build new "$site/root/usr/bin" ./cmd/agentconnect
build new "$libexec" ./cmd/agentconnect-supervisor ./cmd/agentconnect-launch ./cmd/agentconnect-guest
# What an update finds running.
build old "$older" ./cmd/agentconnect-supervisor
cp "$libexec/agentconnect-launch" "$libexec/agentconnect-guest" "$older/"
cp packaging/systemd/user/* "$site/root/usr/lib/systemd/user/"
go test -c -o "$site/machinetest.test" ./cmd/internal/machinetest

passed=()
while IFS= read -r -d '' variable; do
	case "$variable" in AGENTCONNECT_TEST_MACHINE=*) ;; AGENTCONNECT_TEST_*) passed+=("$variable") ;; esac
done < <(env -0)
failed=0
for part in "${parts[@]}"; do
	arguments=(-test.v -test.timeout=30m)
	case "$part" in
	user) user=tester arguments+=(-test.skip "^TestRoot${without:+|$without}") ;;
	root) user=root arguments+=(-test.run '^TestRoot' ${without:+-test.skip "$without"}) ;;
	*) say "no such part: $part" && exit 2 ;;
	esac
	[ -z "$run" ] || arguments+=(-test.run "$run")
	[ -z "$bench" ] || arguments+=(-test.run '^$' -test.bench "$bench" -test.benchtime=1x)
	say "$part on $suite"
	began=$SECONDS code=0
	"$here/machine.sh" -s "$suite" -b "$site" -u "$user" ${logs:+-l "$logs-$part"} -- \
		env ${passed[@]+"${passed[@]}"} /opt/test/machinetest.test "${arguments[@]}" || code=$?
	say "$part on $suite: exit code $code after $((SECONDS - began)) s"
	[ "$code" -eq 0 ] || failed=1
done
exit "$failed"
