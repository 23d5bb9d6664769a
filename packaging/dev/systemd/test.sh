#!/usr/bin/env bash
# Runs the tests that need a real user manager, in the test machine:
#
#	test.sh [bookworm|trixie]…        (default: both: systemd 252 and 257)
#
# RUN=TestName narrows it; BENCH=. runs the benchmarks, too. In the machine nothing may be skipped:
# it has everything. Needs Go as whoever calls it, and root (or sudo) for the machine.
set -euo pipefail

here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P)
top=$(cd "$here/../../.." && pwd -P)
packages=(units dbusctl cmd/internal/systemdtest)
# The folders of tests to run as users without a manager, too.
elsewhere=(cmd/internal/systemdtest)

[ $# -gt 0 ] || set -- bookworm trixie
as_root=()
if [ "$(id -u)" -ne 0 ]; then
	command -v sudo >/dev/null || { printf '%s\n' "test-systemd: run this as root: the test machine needs it" >&2 && exit 1; }
	as_root=(sudo)
	[ -t 0 ] || as_root=(sudo -n)
fi

bin=$(mktemp -d /tmp/agentconnect-tests.XXXXXX)
trap 'rm -rf "$bin"' EXIT
chmod 0755 "$bin"
cd "$top"
# Like `go test`, each runs in its package's folder, next to the files it reads.
for package in "${packages[@]}"; do
	mkdir -p "$bin/$package"
	CGO_ENABLED=0 go test -c -o "$bin/$package/test" "./$package"
	[ ! -d "$package/testdata" ] || cp -R "$package/testdata" "$bin/$package/"
done
mkdir -p "$bin/packaging"
cp -R packaging/systemd "$bin/packaging/"
cat >"$bin/run" <<'RUN'
#!/bin/sh
# In the machine: runs test binaries, prints what failed or was skipped, and one line for each.
code=0
out=$(mktemp)
for package in "$@"; do
	cd "/opt/test/$package" || exit 1
	if ./test -test.v -test.timeout 300s -test.run "$RUN" ${BENCH:+-test.bench "$BENCH" -test.benchmem} >"$out" 2>&1; then
		verdict=ok
	else
		verdict=FAILED code=1
	fi
	if grep -q '^ *--- SKIP' "$out"; then
		verdict="FAILED: skipped" code=1
	fi
	[ "$verdict" = ok ] || cat "$out"
	grep '^Benchmark' "$out"
	printf '%s %s as %s: %s (%s tests passed)\n' "$AGENTCONNECT_TEST_MACHINE" "$package" "$USER" "$verdict" "$(grep -c '^--- PASS' "$out")"
done
exit $code
RUN
chmod -R u+w,go+rX "$bin"
chmod 0755 "$bin/run"

failed=0
for suite in "$@"; do
	for user in tester guest root; do
		run=("${elsewhere[@]}")
		[ "$user" != tester ] || run=("${packages[@]}")
		"${as_root[@]}" "$here/machine.sh" -s "$suite" -b "$bin" -u "$user" -- \
			env "RUN=${RUN:-}" "BENCH=${BENCH:-}" /opt/test/run "${run[@]}" || failed=1
	done
done
exit "$failed"
