#!/usr/bin/env bash
# Prints the path of Ubuntu 22.04's bubblewrap (0.6.1), for tests with a real older one:
#
#	AGENTCONNECT_TEST_OLD_BWRAP=$(packaging/dev/old-bwrap.sh) go test ./cmd/internal/launch -run Old
#
# Fetches it from Ubuntu's archive once, by apt with lists of its own, and checks its sha256.
# The host's packages and sources stay as they are.
set -euo pipefail

sum=3f4f3f862a9b5ee774571fa1c0ef7c4b21a4f457f3acf5a149ade0345305d032
base=${XDG_CACHE_HOME:-$HOME/.cache}/agentconnect-dev/old-bwrap
[ "$(dpkg --print-architecture)" = amd64 ] || { printf '%s\n' "old-bwrap: amd64 only" >&2 && exit 1; }
if [ ! -x "$base/usr/bin/bwrap" ]; then
	work=$(mktemp -d)
	trap 'rm -rf "$work"' EXIT
	mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$base"
	# Ubuntu's key is not Debian's to trust: the checksum below is what counts.
	printf 'deb [trusted=yes] http://archive.ubuntu.com/ubuntu jammy main\n' >"$work/list"
	apt=(apt-get -q -o "Dir::Etc::sourcelist=$work/list" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$work/lists"
		-o "Dir::Cache=$work/cache" -o Acquire::Languages=none -o "APT::Sandbox::User=$(id -un)")
	"${apt[@]}" update >"$work/log" 2>&1 || { cat "$work/log" >&2 && exit 1; }
	(cd "$work" && "${apt[@]}" download bubblewrap=0.6.1-1 >>"$work/log" 2>&1) || { cat "$work/log" >&2 && exit 1; }
	printf '%s  %s\n' "$sum" "$work/bubblewrap_0.6.1-1_amd64.deb" | sha256sum --check --quiet >&2
	dpkg-deb -x "$work/bubblewrap_0.6.1-1_amd64.deb" "$base"
fi
"$base/usr/bin/bwrap" --version >/dev/null
printf '%s\n' "$base/usr/bin/bwrap"
