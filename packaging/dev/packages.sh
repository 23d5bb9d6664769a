#!/usr/bin/env bash
# Installs the system packages that a target needs: packages.sh run|test|lint|bench.
#
# Prints nothing when all is there. Only programs that an ordinary user can reach count:
# a python3 below /root is no use to the tests. Never touches a package that is installed.
set -euo pipefail

say() { printf '%s\n' "packages: $*" >&2; }

# program → Debian package. Programs are looked up in the PATH that the ordinary user gets.
need=(bwrap:bubblewrap rg:ripgrep socat:socat git:git make:make)
case "${1:-}" in
run | lint) ;;
bench) need+=(node:nodejs npm:npm gnuplot:gnuplot-nox dpkg-buildpackage:dpkg-dev dh:debhelper) ;;
# An SSH server without a service: openssh-server would open port 22 of this machine.
test) need+=(python3:python3 node:nodejs npm:npm gcc:gcc musl-gcc:musl-tools
	curl:curl ssh:openssh-client dropbearkey:dropbear-bin gtlsclient:ngtcp2-client gtlsserver:ngtcp2-server
	javac:default-jdk-headless psql:postgresql-client) ;;
*) say "usage: packages.sh run|test|lint|bench" && exit 2 ;;
esac

lookup=$PATH:/usr/sbin # where Debian has servers
[ "$(id -u)" -ne 0 ] || lookup=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

missing=()
find_missing() {
	local entry
	missing=()
	for entry in "${need[@]}"; do
		PATH=$lookup command -v "${entry%%:*}" >/dev/null || missing+=("${entry#*:}")
	done
	# The race detector links against libc: gcc alone is not enough.
	if [ "$1" = test ] && [ ! -e /usr/include/stdio.h ]; then missing+=(libc6-dev); fi
	# Debian keeps the server out of the PATH.
	if [ "$1" = test ] && ! compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null; then missing+=(postgresql); fi
	# Without root certificates every download fails with an error that names none of this.
	[ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
}
find_missing "$1"
[ ${#missing[@]} -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null; then
	say "missing: ${missing[*]}: this machine has no apt-get; install them with your package manager and run this again"
	exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
	if ! command -v sudo >/dev/null; then
		say "missing: ${missing[*]}: run as root: apt-get install ${missing[*]}"
		exit 1
	fi
	as_root=(sudo)
	# Nobody can type a password where there is no terminal.
	[ -t 0 ] || as_root=(sudo -n)
fi
say "installing ${missing[*]}${as_root[*]:+ (with sudo)}"

# The timeout covers dpkg's lock; apt's own lock on its lists has no such option, hence the tries.
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -y -q -o DPkg::Lock::Timeout=600)
install=("${apt[@]}" install --no-install-recommends "${missing[@]}")
log=$(mktemp)
trap 'rm -f "$log"' EXIT
case " ${missing[*]} " in *" postgresql "*)
	# Without a cluster: Debian's would be served on port 5432 of this machine.
	clusters=/etc/postgresql-common/createcluster.d
	restore() {
		rm -f "$log"
		"${as_root[@]}" rm -f "$clusters/agentconnect-dev.conf"
		"${as_root[@]}" rmdir -p --ignore-fail-on-non-empty "$clusters" 2>/dev/null || true
	}
	trap restore EXIT
	"${as_root[@]}" mkdir -p "$clusters"
	echo 'create_main_cluster = false' | "${as_root[@]}" tee "$clusters/agentconnect-dev.conf" >/dev/null
	;;
esac
for try in 1 2 3 4 5; do
	# Packages may be unknown, or gone from the mirror, until the lists are fresh.
	if "${install[@]}" >"$log" 2>&1 </dev/null; then
		find_missing "$1"
		[ ${#missing[@]} -eq 0 ] && exit 0
		say "apt-get succeeded, yet these are still missing: ${missing[*]}: see above"
		exit 1
	fi
	[ "$try" -eq 1 ] || sleep 5
	"${apt[@]}" update >>"$log" 2>&1 </dev/null || true
done
cat "$log" >&2
say "apt-get install ${missing[*]} failed: the reason is above"
exit 1
