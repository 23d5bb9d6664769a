#!/usr/bin/env bash
# Boots a machine with AppArmor, runs one command in it as root, and powers it off:
#
#	apparmor.sh [-b DIR] [-t SECONDS] [-l DIR] -- COMMAND [ARG]…
#
#	-b  a folder of the host, a copy of it at /opt/test in the machine
#	-t  the longest that all of it may take (default 7200)
#	-l  where the journal and the console go when the command fails (default: a new folder in /tmp)
#
# Exits with the command's status, or 125 when the machine said none.
#
# It is Debian 13 with its own kernel and AppArmor 4 (Debian 12's parser does not know the profile),
# under qemu without any help of the host's: an emulated processor, slow, and without a network. It
# runs in a pid namespace: however this script ends, nothing of the machine outlives it. Runs as
# root; amd64 only.
set -euo pipefail
umask 022

say() { printf '%s\n' "apparmor machine: $*" >&2; }
here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P)
base=/var/cache/agentconnect-dev/deb

bind='' limit=7200 logs=''
while getopts b:t:l: opt; do
	case "$opt" in
	b) bind=$(readlink -e "$OPTARG") ;;
	t) limit=$OPTARG ;;
	l) logs=$OPTARG ;;
	*) exit 2 ;;
	esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || { say "which command?" && exit 2; }
[ "$(id -u)" -eq 0 ] || { say "run this as root" && exit 1; }
[ "$(dpkg --print-architecture)" = amd64 ] || { say "amd64 only" && exit 1; }

"$here/../systemd/packages.sh" emulated
from=$("$here/../systemd/root.sh" trixie)
packages=(linux-image-cloud-amd64 apparmor apparmor-profiles)
root=$base/apparmor-$(printf '%s\n' "$from" "${packages[@]}" | sha256sum | cut -c1-16)
mkdir -p "$base"
if [ ! -e "$root/.complete" ]; then
	exec 9>"$base/apparmor.lock"
	flock 9
fi
if [ ! -e "$root/.complete" ]; then
	say "building $root (once)"
	rm -rf --one-file-system "$base"/apparmor-*/
	cp -a --reflink=auto "$from" "$root.part"
	rm "$root.part/.complete"
	cp -L /etc/resolv.conf "$root.part/etc/resolv.conf"
	if ! unshare --mount --pid --fork --mount-proc chroot "$root.part" sh -ec 'export DEBIAN_FRONTEND=noninteractive
		apt-get update && apt-get -y --no-install-recommends install "$@"
		rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/lib/apt/lists/* /var/cache/apt/archives/*.deb' sh "${packages[@]}" >"$root.log" 2>&1 </dev/null 9>&-; then
		tail -n 40 "$root.log" >&2
		rm -rf --one-file-system "$root.part"
		say "it failed: the reason is above, all of it in $root.log"
		exit 1
	fi
	rm "$root.part/etc/resolv.conf"
	touch "$root.part/.complete"
	mv -T "$root.part" "$root"
fi
exec 7<"$root"
flock -s 7

state=$(mktemp -d "$base/machine.XXXXXX")
[ -n "$logs" ] || logs=/tmp/$(basename "$state").log
trap 'rm -rf --one-file-system "$state"' EXIT
printf '%s\0' "$@" >"$state/command"
unshare --mount -- "$BASH" -euo pipefail -s "$root" "$state" "$bind" <<'INSIDE'
root=$1 state=$2 bind=$3
mount --make-rprivate /
mkdir "$state/over"
mount -t tmpfs -o mode=0755 image "$state/over"
mkdir "$state/over/upper" "$state/over/work" "$state/over/root"
mount -t overlay overlay -o "lowerdir=$root,upperdir=$state/over/upper,workdir=$state/over/work" "$state/over/root"
cd "$state/over/root"
mkdir -p opt/test usr/local/lib/machine etc/systemd/system/multi-user.target.wants
[ -z "$bind" ] || cp -R "$bind/." opt/test/
cp "$state/command" usr/local/lib/machine/arguments
echo '/dev/vda / ext4 defaults 0 0' >etc/fstab
cat >usr/local/lib/machine/command <<'SH'
#!/bin/bash
exec </dev/null >/dev/ttyS1 2>&1
mapfile -d '' -t command </usr/local/lib/machine/arguments
code=0
env -i --chdir=/ PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 TERM=dumb NO_COLOR=1 HOME=/root USER=root LOGNAME=root \
	AGENTCONNECT_TEST_MACHINE=apparmor "${command[@]}" || code=$?
[ "$code" -eq 0 ] || journalctl --no-pager --quiet --boot --output=short-monotonic >/dev/ttyS3 2>&1 || true
echo "$code" >/dev/ttyS2
SH
chmod 0755 usr/local/lib/machine/command
cat >etc/systemd/system/machine-command.service <<'UNIT'
[Unit]
Description=Run the command of this test, and power off
Requires=user@1000.service
After=user@1000.service systemd-user-sessions.service dbus.service
SuccessAction=poweroff
FailureAction=poweroff
[Service]
Type=oneshot
TimeoutStartSec=infinity
ExecStart=/usr/local/lib/machine/command
UNIT
ln -s ../machine-command.service etc/systemd/system/multi-user.target.wants/
mke2fs -q -t ext4 -O ^has_journal -m 0 -E root_owner=0:0 -d . "$state/image" 3G >/dev/null
INSIDE

code=0 began=$SECONDS
setpriv --pdeathsig KILL unshare --pid --fork --kill-child=KILL --mount-proc -- timeout --kill-after=5 "$limit" \
	qemu-system-x86_64 -nodefaults -no-user-config -machine q35 -accel tcg,thread=multi -cpu max -smp 2 -m 2048 -no-reboot -display none -nic none \
	-drive "file=$state/image,format=raw,if=virtio,cache=unsafe" -kernel "$(echo "$root"/boot/vmlinuz-*)" -initrd "$(echo "$root"/boot/initrd.img-*)" \
	-append "root=/dev/vda rw console=ttyS0 quiet systemd.show_status=no" \
	-serial "file:$state/console" -serial stdio -serial "file:$state/status" -serial "file:$state/journal" </dev/null 7<&- &
machine=$!
stop() {
	kill -KILL "$machine" 2>/dev/null || true
	wait "$machine" 2>/dev/null || true
	exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM HUP
wait "$machine" || code=$?
status=$(tr -dc 0-9 <"$state/status" 2>/dev/null || true)
if [ -z "$status" ]; then
	tail -n 40 "$state/console" >&2 || true
	say "it ended with $code after $((SECONDS - began)) s, and without the command's status: its console is above"
	status=125
fi
say "off after $((SECONDS - began)) s"
if [ "$status" -ne 0 ]; then
	mkdir -p "$logs"
	cp "$state/console" "$state/journal" "$logs/"
	tail -n "${MACHINE_JOURNAL_LINES:-60}" "$logs/journal" >&2
	say "the end of the journal is above, all of it in $logs/journal"
fi
exit "$status"
