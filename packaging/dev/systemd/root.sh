#!/usr/bin/env bash
# Builds the root file system of the test machine, once, and prints its path:
#
#	root.sh [bookworm|trixie]
#
# It lies below /var/cache/agentconnect-dev/systemd under a name made of the suite and a hash of
# this file, so that a change here makes a new one. Runs as root. Nothing boots it in place:
# machine.sh lays a writable layer over it for each boot.
#
# In it: systemd with logind and a user manager on demand, the user bus, and what an agent's
# boundary needs. Two ordinary users: tester (uid 1000, lingering: its user manager starts at
# boot) and guest (uid 1001, not lingering).
set -euo pipefail
umask 022

say() { printf '%s\n' "test root: $*" >&2; }
# mmdebstrap runs a python3 for each package: the system's own, not one that a shim has to find.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

suite=${1:-bookworm}
case "$suite" in
bookworm | trixie) ;;
*) say "unknown suite $suite: want bookworm or trixie" && exit 2 ;;
esac
[ "$(id -u)" -eq 0 ] || { say "run this as root" && exit 1; }

base=/var/cache/agentconnect-dev/systemd
key=$(sha256sum <"${BASH_SOURCE[0]}" | cut -c1-16)
root=$base/$suite-$key
if [ -e "$root/.complete" ]; then
	touch "$root/.complete"
	printf '%s\n' "$root"
	exit 0
fi

mkdir -p "$base"
exec 9>"$root.lock" # one that builds is waited for; others are built at the same time
flock 9
if [ -e "$root/.complete" ]; then
	printf '%s\n' "$root"
	exit 0
fi

packages=(
	systemd systemd-sysv libpam-systemd dbus dbus-user-session
	bubblewrap ripgrep socat git procps iproute2 ca-certificates crun
)
part=$root.part
rm -rf --one-file-system "$part"
log=$base/$suite-$key.log
say "building $root (once; about a minute): ${packages[*]}"
start=$SECONDS
# The hooks run on the host, with $1 as the new root.
# shellcheck disable=SC2016
if ! TMPDIR=$base mmdebstrap --variant=minbase --mode=root \
	--include="$(IFS=,; printf '%s' "${packages[*]}")" \
	--aptopt='Acquire::Retries "4"' \
	--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/man/*' \
	--customize-hook='chroot "$1" useradd --uid 1000 --create-home --shell /bin/bash tester' \
	--customize-hook='chroot "$1" useradd --uid 1001 --create-home --shell /bin/bash guest' \
	--customize-hook='chmod 0700 "$1/home/tester" "$1/home/guest"' \
	--customize-hook='mkdir -p "$1/var/lib/systemd/linger" && : >"$1/var/lib/systemd/linger/tester"' \
	--customize-hook='echo agentconnect-test >"$1/etc/hostname"; printf "127.0.0.1 localhost agentconnect-test\n::1 localhost\n" >"$1/etc/hosts"' \
	--customize-hook='systemd-machine-id-setup --root="$1" >/dev/null 2>&1' \
	--customize-hook='mkdir -p "$1/etc/systemd/journald.conf.d" && printf "[Journal]\nStorage=persistent\nRateLimitIntervalSec=0\nSyncIntervalSec=1s\n" >"$1/etc/systemd/journald.conf.d/test.conf"' \
	--customize-hook='for unit in getty.target getty-static.service console-getty.service systemd-networkd.service systemd-resolved.service systemd-timesyncd.service apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer systemd-tmpfiles-clean.timer systemd-pcrphase.service; do ln -sfn /dev/null "$1/etc/systemd/system/$unit"; done' \
	--quiet "$suite" "$part" >"$log" 2>&1 </dev/null 9>&-; then
	tail -n 40 "$log" >&2
	rm -rf --one-file-system "$part"
	say "mmdebstrap failed: the reason is above, all of it in $log"
	exit 1
fi
touch "$part/.complete"
mv -T "$part" "$root"
say "built in $((SECONDS - start)) s"

# An older one stays that a running machine still uses (its lock is held), or that was built or
# used within a day: another working tree may go by it.
for old in "$base/$suite"-*/; do
	old=${old%/}
	[ "$old" != "$root" ] || continue
	[ -z "$(find "$old" "$old/.complete" -maxdepth 0 -cmin -1440 2>/dev/null)" ] || continue
	if flock -n "$old" true; then rm -rf --one-file-system "$old" "$old.log" "$old.lock"; fi
done
printf '%s\n' "$root"
