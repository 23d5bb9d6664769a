#!/usr/bin/env bash
# Builds the root of a clean machine for the package, once, and prints its path:
#
#	root.sh [bookworm|trixie]
#
# It is the test machine's root (../systemd/root.sh) without anything that the package depends
# on, and with a folder that stands for Debian's mirror, since the machine has no network:
# /srv/mirror, from which apt there installs. Runs as root.
set -euo pipefail
umask 022

say() { printf '%s\n' "deb root: $*" >&2; }
here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P)
suite=${1:-bookworm}
[ "$(id -u)" -eq 0 ] || { say "run this as root" && exit 1; }
from=$("$here/../systemd/root.sh" "$suite")

base=/var/cache/agentconnect-dev/deb
root=$base/$suite-$({ echo "$from" && cat "${BASH_SOURCE[0]}"; } | sha256sum | cut -c1-16)
if [ ! -e "$root/.complete" ]; then
	mkdir -p "$base"
	exec 9>"$root.lock"
	flock 9
fi
if [ ! -e "$root/.complete" ]; then
	say "building $root (once)"
	start=$SECONDS part=$root.part log=$root.log
	rm -rf --one-file-system "$part"
	cp -a --reflink=auto "$from" "$part"
	rm "$part/.complete"
	cp -L /etc/resolv.conf "$part/etc/resolv.conf"
	# The documents of the package are part of it.
	rm -f "$part/etc/dpkg/dpkg.cfg.d/99mmdebstrap"
	cat >"$part/make" <<'INSIDE'
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get -y purge bubblewrap ripgrep socat git dbus-user-session
apt-get -y autoremove --purge
apt-get -y --download-only install bubblewrap ripgrep socat git dbus-user-session apparmor autopkgtest
mkdir -p /srv/mirror
mv /var/cache/apt/archives/*.deb /srv/mirror/
rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/lib/apt/lists/*
echo 'deb [trusted=yes] file:/srv/mirror ./' >/etc/apt/sources.list
INSIDE
	if ! { unshare --mount --pid --fork --mount-proc chroot "$part" sh /make && cd "$part/srv/mirror" && apt-ftparchive packages . >Packages; } >"$log" 2>&1 </dev/null 9>&-; then
		tail -n 40 "$log" >&2
		rm -rf --one-file-system "$part"
		say "it failed: the reason is above, all of it in $log"
		exit 1
	fi
	rm "$part/make" "$part/etc/resolv.conf"
	touch "$part/.complete"
	mv -T "$part" "$root"
	say "built in $((SECONDS - start)) s"
	for old in "$base/$suite"-*/; do
		old=${old%/}
		[ "$old" != "$root" ] || continue
		[ -z "$(find "$old" "$old/.complete" -maxdepth 0 -cmin -1440 2>/dev/null)" ] || continue
		if flock -n "$old" true; then rm -rf --one-file-system "$old" "$old.log" "$old.lock"; fi
	done
fi
touch "$root/.complete"
printf '%s\n' "$root"
