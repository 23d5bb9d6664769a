#!/usr/bin/env bash
# All tests, as `make test` runs them, with one report at the end:
#
#	first those on real systemd, each part in a machine of its own, as root or with sudo;
#	then all others, as an ordinary user (enter.sh).
#
# With PKG or RUN set: those alone, and no machine. SUITES names the Debian releases for the
# installed product and the limits (default bookworm: systemd 252); units and bus are tested on
# systemd 252 and 257 in any case. AGENTCONNECT_TEST_CHAOS=300s makes the chaos longer.
#
# Where there is neither root nor sudo the machines are left out, and the report says so; where
# CI is set that is a failure.
set -euo pipefail
umask 022
here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P)
cd "$here/../.."
make=(make --no-print-directory here-test)

say() { printf '%s\n' "test: $*" >&2; }

[ -z "${PKG:-}${RUN:-}" ] || exec "$here/enter.sh" test "${make[@]}"

events=$(mktemp -d /tmp/agentconnect-test-events.XXXXXX)
script=
cleanup() {
	trap - EXIT INT TERM HUP
	if [ -n "$script" ]; then
		kill -TERM "$script" 2>/dev/null || true
		wait "$script" || true
	fi
	rm -rf "$events"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
chmod 0755 "$events"

# machine NAME SCRIPT [OPTION]…: one script of systemd/, its events in NAME.json. A script that
# ended before its tests did shows up in the report as a package without an end.
machine() {
	local file=$events/$1.json
	# In the background: bash runs no trap while it waits for a command in the foreground.
	AGAIN=1 "$here/systemd/$2" -j "$file" "${@:3}" </dev/null &
	script=$!
	local code=0
	wait "$script" || code=$?
	script=
	[ "$code" -ne 0 ] || return 0
	# A machine that did not come up, or went down, or failed in many ways, runs again, and that
	# it did is said. A few tests that failed have been tried again by then.
	local tests
	tests=$(sed -n 's/.*"Action":"fail".*"Test":"\([^"/]*\).*/\1/p' "$file" 2>/dev/null | sort -u | wc -l)
	if [ ! -e "$file.first" ] && { [ "$tests" -eq 0 ] || [ "$tests" -gt 4 ]; }; then
		say "$1 FAILED ONCE and runs again; what failed: $(grep -hs '"Action":"fail"' "$file" | tr '\n' ' ' | cut -c1-2000)"
		mv "$file" "$file.first" 2>/dev/null || : >"$file.first"
		machine "$@"
		return
	fi
	grep -qs '"Action":"fail"' "$file" ||
		printf '{"Action":"start","Package":"%s"}\n' "packaging/dev/systemd/$2@$1" >>"$file"
}

missing=''
[ "$(uname -s)" = Linux ] || missing="Linux"
[ -n "$missing" ] || [ "$(id -u)" -eq 0 ] || sudo -n true 2>/dev/null || { [ -t 0 ] && command -v sudo >/dev/null && sudo true; } ||
	missing="root, or sudo without a password"
[ -n "$missing" ] || command -v apt-get >/dev/null || missing="apt-get, which installs what makes the machines"
if [ -z "$missing" ]; then
	export PATH="$PATH:/usr/local/go/bin"
	for suite in bookworm trixie; do
		machine "systemd-$suite" test.sh -s "$suite"
	done
	for suite in ${SUITES:-bookworm}; do
		machine "product-$suite" product.sh -s "$suite"
		machine "limits-$suite" limits-test.sh -s "$suite" -t 900
	done
else
	say "the tests on real systemd are left out: missing: $missing"
	printf '%s\n' "the tests on real systemd (make test-systemd test-product test-chaos test-limits): missing: $missing" >"$events/left-out"
fi
"$here/enter.sh" test "${make[@]}" "MACHINES=$events"
