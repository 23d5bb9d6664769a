#!/usr/bin/env bash
# Tests the package: test.sh [-a] [bookworm|trixie]… (default: bookworm)
#
# Builds it twice and compares, builds a newer version, runs lintian, makes a signed repository,
# and installs from there in a clean machine for each release (cmd/internal/debtest has the
# tests). Builds as whoever calls; the machine needs root or sudo. -r REGEXP narrows the tests,
# -l DIR says where the journal goes when something fails. BUILT=DIR keeps the packages there
# and uses what it finds. With -a it has the machine with AppArmor (apparmor.sh) in place of all
# others, and no lintian.
set -euo pipefail
umask 022

say() { printf '%s\n' "deb tests: $*" >&2; }
here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P)
tree=$(cd "$here/../../.." && pwd -P)
deb=$tree/packaging/deb
run='' logs='' apparmor=''
while getopts ar:l: opt; do
	case "$opt" in
	a) apparmor=yes ;;
	r) run=$OPTARG ;;
	l) logs=$OPTARG ;;
	*) exit 2 ;;
	esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || set -- bookworm
as_root=()
if [ "$(id -u)" -ne 0 ]; then
	command -v sudo >/dev/null || { say "run this as root, or with sudo installed" && exit 1; }
	as_root=(sudo)
	[ -t 0 ] || as_root=(sudo -n)
fi
command -v go >/dev/null || export PATH=$PATH:/usr/local/go/bin

missing=()
for pair in dpkg-buildpackage:dpkg-dev dh:debhelper lintian:lintian apt-ftparchive:apt-utils gpg:gpg xz:xz-utils; do
	command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}")
done
if [ ${#missing[@]} -gt 0 ]; then
	say "installing ${missing[*]}"
	log=$(mktemp)
	apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -y -q -o DPkg::Lock::Timeout=600)
	"${apt[@]}" install --no-install-recommends "${missing[@]}" >"$log" 2>&1 </dev/null ||
		{ "${apt[@]}" update >"$log" 2>&1 && "${apt[@]}" install --no-install-recommends "${missing[@]}" >>"$log" 2>&1; } </dev/null ||
		{ cat "$log" >&2 && exit 1; }
	rm -f "$log"
fi

site=$(mktemp -d /tmp/agentconnect-deb-tests.XXXXXX)
trap 'rm -rf "$site"' EXIT
chmod 0755 "$site"
built=${BUILT:-$site/built}
mkdir -p "$built"
failed=0 timeout=15m

# The cache of Go's is the caller's: what is in it, it has by content. Tests of the build: nocheck.
GOCACHE=$(go env GOCACHE)
export GOCACHE DEB_BUILD_OPTIONS="nocheck parallel=2"
old=$(dpkg-parsechangelog -l "$tree/debian/changelog" -S Version)
new=$old+next1
arch=$(dpkg --print-architecture)
began=$SECONDS
package=$built/agentconnect-sandbox_${old}_$arch.deb
next=$built/agentconnect-sandbox_${new}_$arch.deb
if [ ! -e "$next" ]; then
	tarball=$("$deb/dist.sh" -o "$site")
	"$deb/build.sh" -t "$tarball" -o "$built" >/dev/null
	# Elsewhere, at another time, by another name of the folder.
	"$deb/build.sh" -t "$tarball" -o "$built/again" >/dev/null
	"$deb/build.sh" -v "$new" -o "$built" >/dev/null
	say "three builds in $((SECONDS - began)) s"
fi
sha256sum "$package" "$built/again/$(basename "$package")"
if ! cmp "$package" "$built/again/$(basename "$package")"; then
	say "two builds of one source differ"
	failed=1
fi
say "size: $(stat -c %s "$package") bytes, installed: $(dpkg-deb -f "$package" Installed-Size) KiB"

if [ -z "$apparmor" ]; then
	began=$SECONDS
	say "lintian"
	# Shown, what is overridden would count as well; the reasons stand in the overrides themselves.
	lintian --tag-display-limit 0 --fail-on error,warning "$package" "$built/agentconnect-sandbox_$old.dsc" || failed=1
	say "lintian: $((SECONDS - began)) s"
fi

"$deb/repo.sh" -d "$site/key" -u file:/opt/test/old "$site/machine/old" "$package"
"$deb/repo.sh" -d "$site/key" -u file:/opt/test/new "$site/machine/new" "$package" "$next"
mkdir "$site/machine/source"
cp -R "$tree/debian" "$site/machine/source/"
cd "$tree"
CGO_ENABLED=0 go test -c -o "$site/machine/debtest.test" ./cmd/internal/debtest
chmod -R u+w,go+rX "$site/machine"

# life NAME COMMAND [ARG]…: the tests in one machine. It goes by the clock of a host that others
# use, too: what failed once runs again, and that it did is said.
life() {
	local name=$1 try began code
	shift
	for try in 1 2; do
		began=$SECONDS code=0
		"${as_root[@]}" "$@" ${logs:+-l "$logs-$name"} -- \
			/opt/test/debtest.test -test.v -test.timeout="$timeout" ${run:+-test.run "$run"} | tee "$site/out" || code=$?
		if grep -q -- '--- SKIP' "$site/out"; then
			say "a test was skipped, and nothing is missing in the machine"
			code=1
		fi
		say "$name: exit code $code after $((SECONDS - began)) s"
		[ "$code" -ne 0 ] || return 0
		[ "$try" -eq 2 ] || say "$name FAILED ONCE and runs again; what failed: $(grep -e '--- FAIL' "$site/out" | tr '\n' ' ')"
	done
	failed=1
}
if [ -n "$apparmor" ]; then
	run=${run:-^TestAppArmor} timeout=2h
	life apparmor "$here/apparmor.sh" -b "$site/machine"
else
	run=${run:-^Test(Package|ZAutopkgtest)$}
	for suite in "$@"; do
		root=$("${as_root[@]}" "$here/root.sh" "$suite")
		life "$suite" "$here/../systemd/machine.sh" -R "$root" -b "$site/machine" -u root
	done
fi
exit "$failed"
