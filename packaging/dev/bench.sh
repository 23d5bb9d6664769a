#!/usr/bin/env bash
# Measures everything and writes docs/bench.md with its plots:
#
#	bench.sh [-s bookworm|trixie] [OPTION OF agentconnect-bench]…
#
# First directly, as an ordinary user (enter.sh), then under systemd in the test machine, as
# root or with sudo. With an option for agentconnect-bench (-only start) that is measured alone,
# the table printed, and nothing written. About a quarter of an hour on a machine that does nothing else.
set -euo pipefail
umask 022
here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P)
cd "$here/../.."

suite=bookworm
if [ "${1:-}" = -s ]; then
	suite=$2
	shift 2
fi
if [ $# -gt 0 ]; then
	BENCH="$*" exec "$here/enter.sh" bench make --no-print-directory here-bench
fi

as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)
out=$(mktemp -d /tmp/agentconnect-bench.XXXXXX)
# Each running agent takes an inotify instance, and 128 are a user's by default: not enough for 500.
instances=$(sysctl -n fs.inotify.max_user_instances)
trap 'rm -rf "$out"; "${as_root[@]}" sysctl -q "fs.inotify.max_user_instances=$instances"' EXIT
"${as_root[@]}" sysctl -q fs.inotify.max_user_instances=1024
"$here/packages.sh" bench
BENCH=-lines "$here/enter.sh" bench make --no-print-directory here-bench >"$out/direct"
"$here/systemd/product.sh" -s "$suite" -p user -b . >"$out/systemd"
deb=$("$here/../deb/build.sh" -o "$out/deb")
{
	printf 'figure {"key":"size/deb","what":"the package to download","unit":"MB","ours":%s}\n' "$(stat -c %s "$deb" | awk '{ print $1 / 1e6 }')"
	printf 'figure {"key":"size/installed","what":"the package installed, as it says itself","unit":"MB","ours":%s}\n' "$(dpkg-deb -f "$deb" Installed-Size | awk '{ print $1 * 1024 / 1e6 }')"
} >"$out/package"
go run ./cmd/agentconnect-bench -report docs "$out/direct" "$out/systemd" "$out/package"
printf 'written: docs/bench.md\n'
