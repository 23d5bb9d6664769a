#!/usr/bin/env bash
# Runs a command of the build as an ordinary user, with what it needs installed:
#
#	enter.sh run|test|lint|bench COMMAND [ARG]…
#
# The product refuses to run agents as root, so the tests cannot be root's either. Started by an
# ordinary user, the command runs right here. Started by root, it runs as the user
# agentconnect-dev (made when missing; `userdel -r agentconnect-dev` takes it all away again) in
# a copy of this working tree below that user's home, because root's checkout may be in a folder
# that nobody else can read. One run at a time: a second one waits, so that "what is still
# running?" has one answer at the end.
set -euo pipefail
umask 022

user=agentconnect-dev
home=/home/$user
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)

say() { printf '%s\n' "enter: $*" >&2; }

[ $# -ge 2 ] || { say "usage: enter.sh run|test|lint|bench COMMAND [ARG]…" && exit 2; }

uid=$(id -u)
if [ -z "${AC_DEV_LOCKED:-}" ]; then
	if [ "$uid" -eq 0 ]; then lock=/run/$user.lock; else lock=${XDG_CACHE_HOME:-$HOME/.cache}/agentconnect-dev/lock; fi
	mkdir -p "$(dirname "$lock")"
	flock -n "$lock" true || say "another run is under way; waiting for it to end"
	# -o: the lock must not be inherited by what the command starts.
	AC_DEV_LOCKED=1 exec flock -o "$lock" "$BASH" "${BASH_SOURCE[0]}" "$@"
fi
unset AC_DEV_LOCKED

what=$1
shift
cd "$top"

version=$(git -c safe.directory="$top" describe --tags --always --dirty 2>/dev/null || echo dev)
go=$(command -v go || true)
[ -n "$go" ] || [ ! -x /usr/local/go/bin/go ] || go=/usr/local/go/bin/go
if [ -z "$go" ]; then
	say "go is not in PATH: install Go 1.26 from https://go.dev/dl/ and run this again"
	exit 1
fi

"$top/packaging/dev/packages.sh" "$what"

if [ "$uid" -ne 0 ]; then
	export AC_VERSION=${AC_VERSION:-$version} PATH="$(dirname "$go"):$PATH"
	exec "$@" </dev/null
fi

# ---- from here on: root ----

if ! id "$user" >/dev/null 2>&1; then
	say "making the ordinary user $user"
	useradd --create-home --home-dir "$home" --shell /bin/bash --comment "agentconnect build and tests" "$user"
fi
home=$(getent passwd "$user" | cut -d: -f6)
group=$(id -g "$user")
if [ ! -d "$home" ]; then install -d -m 0700 -o "$user" -g "$group" "$home"; fi
chmod 0700 "$home"

# A variable of root's environment crosses over only by name: proxies, certificates, and what
# says where packages come from.
env=(HOME="$home" USER="$user" LOGNAME="$user" SHELL=/bin/bash LANG=C.UTF-8 AC_VERSION="$version" GOFLAGS=-buildvcs=false)
for name in CI TERM NO_COLOR PKG RUN FUZZTIME BENCH AGENTCONNECT_TEST_SOAK AGENTCONNECT_TEST_RACES http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY \
	SSL_CERT_FILE SSL_CERT_DIR NODE_EXTRA_CA_CERTS; do
	[ -z "${!name:-}" ] || env+=("$name=${!name}")
done
for name in GOPROXY GOSUMDB GONOSUMDB GONOPROXY GOPRIVATE GOINSECURE GOVCS GOTOOLCHAIN; do
	value=$("$go" env "$name")
	[ -z "$value" ] || env+=("$name=$value")
done
if command -v npm >/dev/null; then
	registry=$(npm config get registry 2>/dev/null </dev/null || true)
	case "$registry" in http*) env+=("npm_config_registry=$registry") ;; esac
fi

# The working directory and stdin are never root's.
cd /
exec </dev/null
as_user=(setpriv --reuid "$user" --regid "$group" --init-groups
	env -i "${env[@]}" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)

# A toolchain below /root is copied once: the user cannot execute it where it lies.
goroot=$(GOTOOLCHAIN=local "$go" env GOROOT)
if ! "${as_user[@]}" test -x "$goroot/bin/go" -a -r "$goroot/src/fmt/print.go"; then
	copy=$home/$(GOTOOLCHAIN=local "$go" env GOVERSION)
	if [ ! -x "$copy/bin/go" ]; then
		say "copying the Go toolchain to $copy: $user cannot read $goroot"
		"${as_user[@]}" sh -c 'rm -rf "$1" && mkdir -p "$1"' sh "$copy.part"
		tar -C "$goroot" -cf - . | "${as_user[@]}" tar -C "$copy.part" -xf -
		"${as_user[@]}" mv "$copy.part" "$copy"
	fi
	goroot=$copy
fi
as_user+=(PATH="$goroot/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")

# The copy: what git tracks and what it would (not ignored), less what was deleted. Root only
# reads; every write below the home is the user's own, so no link in there can mislead root.
# bin/ stays, for go build leaves a program alone that is up to date.
area=$home/build
list=$(mktemp)
trap 'rm -f "$list"' EXIT
if git -c safe.directory="$top" -C "$top" rev-parse --is-inside-work-tree >/dev/null 2>&1; then
	git -c safe.directory="$top" -C "$top" ls-files -co --exclude-standard -z |
		(cd "$top" && while IFS= read -r -d '' f; do if [ -e "$f" ] || [ -L "$f" ]; then printf '%s\0' "$f"; fi; done) >"$list"
else
	(cd "$top" && find . -path ./bin -prune -o ! -type d -print0) >"$list"
fi
"${as_user[@]}" sh -c 'rm -rf "$1.new" && mkdir -p "$1.new"' sh "$area"
tar -C "$top" --null --no-recursion --verbatim-files-from -T "$list" -cf - | "${as_user[@]}" tar -C "$area.new" -xf -
"${as_user[@]}" sh -c 'if [ -d "$1/bin" ]; then mv "$1/bin" "$1.new/bin"; fi; rm -rf "$1" && mv "$1.new" "$1"' sh "$area"

# What the run left running: processes of the user, but for its own user manager, which is not ours.
left_running() {
	local dir pid
	for dir in /proc/[0-9]*; do
		pid=${dir#/proc/}
		[ "$(stat -c %U "$dir" 2>/dev/null)" = "$user" ] || continue
		# A zombie has ended; a command line that is empty is one, or a kernel thread.
		[ -n "$(tr '\0' ' ' <"$dir/cmdline" 2>/dev/null)" ] || continue
		grep -qs 'user@' "$dir/cgroup" && continue
		printf '%s\n' "$pid"
	done
}
sweep() {
	local code=$? pids try
	trap - EXIT INT TERM
	rm -f "$list"
	for try in 1 2 3 4 5 6 7 8 9 10; do
		pids=$(left_running)
		[ -n "$pids" ] || exit "$code"
		sleep 0.5
	done
	say "still running after the end; ended now:"
	for pid in $pids; do
		say "  $pid $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null || true)"
		kill -KILL "$pid" 2>/dev/null || true
	done
	[ "$code" -ne 0 ] || code=1
	exit "$code"
}
trap sweep EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

before=$(left_running)
if [ -n "$before" ]; then
	say "processes of $user run already ($(printf '%s ' $before)): end them first, for nothing else may run as that user"
	trap 'rm -f "$list"' EXIT
	exit 1
fi
"${as_user[@]}" sh -c 'cd "$1" && shift && exec "$@"' sh "$area" "$@"
