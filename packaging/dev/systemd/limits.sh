#!/usr/bin/env bash
# Boots the machine with real limits, runs one command in it, and powers it off:
#
#	limits.sh [-s bookworm|trixie] [-b DIR] [-u tester|root] [-m MIB] [-t SECONDS] [-l DIR] -- COMMAND [ARG]…
#
#	-s  the Debian release (default bookworm: systemd 252; trixie: systemd 257)
#	-b  a folder of the host, a copy of it at /opt/test in the machine; what lies in its folder
#	    root/ is copied over the machine's root before any user manager starts
#	-u  who runs the command (default tester: in a scope of the lingering user's manager;
#	    root is in a service of the system's)
#	-m  memory of the machine (default 2048)
#	-t  the longest that all of it may take (default 900)
#	-l  where the journal and the console go when the command fails (default: a new folder in /tmp)
#
# Exits with the command's status, or 125 when the machine did not come up or said no status.
#
# The machine is User-Mode Linux over an image of the same root that machine.sh uses: a kernel of
# its own (Debian 12's 6.1, without PSI), so that the cpu, memory and pids controllers are real and
# the OOM killer kills. It has one processor and no network. It runs in a pid namespace: however
# this script ends, nothing of the machine outlives it. Several can run at once. Runs as root.
set -euo pipefail
umask 022

say() { printf '%s\n' "limits machine: $*" >&2; }
here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P)
base=/var/cache/agentconnect-dev/systemd

# ---- the inner half: pid 1 of a pid namespace, with a mount namespace ----

if [ "${1:-}" = --inside ]; then
	image=$2 amx=$3 bind=$4 user=$5 memory=$6 limit=$7 logs=$8 state=$9 release=${10}
	shift 10
	mount --make-rprivate /
	# The machine's memory is a file that it maps with the right to execute.
	mount -t tmpfs -o mode=0700,size=100% machine "$state"
	shared=$state/shared
	mkdir "$shared" "$state/memory"
	printf '%s\n' "$user" >"$shared/user"
	printf '%s\n' "$release" >"$shared/release"
	printf '%s\0' "$@" >"$shared/command"
	[ -z "$bind" ] || mke2fs -q -t ext4 -O ^has_journal -m 0 -E root_owner=0:0 -d "$bind" \
		"$state/payload" "$(($(du -s --apparent-size -BM "$bind" | cut -f1 | tr -d M) * 5 / 4 + 32))M" >/dev/null

	# What ends these pipes is the machine's end; UML makes its ends non-blocking, so that they
	# must not be the caller's own.
	mkfifo "$state/output" "$state/console-pipe"
	cat <"$state/output" &
	output=$!
	cat <"$state/console-pipe" >"$state/console" &
	console=$!
	devices=("ubd0=$state/changes,$image")
	[ -z "$bind" ] || devices+=("ubd1r=$state/payload")
	began=$(date +%s%N)
	since() { printf '%d.%02d s' $((($(date +%s%N) - began) / 1000000000)) $((($(date +%s%N) - began) / 10000000 % 100)); }
	code=0
	TMPDIR=$state/memory timeout --kill-after=5 "$limit" env "LD_PRELOAD=$amx" linux.uml "${devices[@]}" root=/dev/ubda rw "mem=${memory}M" \
		umid=machine "uml_dir=$state/memory" con=null con0=null,fd:3 ssl=null ssl0=null,fd:4 quiet systemd.show_status=no \
		systemd.unified_cgroup_hierarchy=1 "hostshared=$shared" </dev/null >"$state/uml" 2>&1 \
		3>"$state/console-pipe" 4>"$state/output" || code=$?
	wait "$console" "$output"
	up=no
	[ ! -e "$shared/up" ] || up=$(cat "$shared/up")
	if [ -s "$shared/status" ]; then
		say "up after $up s of its own, off after $(since)"
		code=$(cat "$shared/status")
	else
		cat "$state/uml" "$state/console" | tail -n 40 >&2
		case "$code" in
		124 | 137) say "it had $limit s and was ended" ;;
		*) say "it ended with $code and without the command's status (up: $up): its console is above" ;;
		esac
		code=125
	fi
	if [ "$code" -ne 0 ]; then
		mkdir -p "$logs"
		cp "$state/console" "$logs/console"
		if [ -e "$shared/journal" ]; then
			cp "$shared/journal" "$logs/journal"
			tail -n "${MACHINE_JOURNAL_LINES:-60}" "$logs/journal" >&2
			say "the end of the journal is above, all of it in $logs/journal"
		fi
	fi
	exit "$code"
fi

# ---- the outer half ----

suite=bookworm bind='' user=tester memory=2048 limit=900 logs=''
while getopts s:b:u:m:t:l: opt; do
	case "$opt" in
	s) suite=$OPTARG ;;
	b) bind=$(readlink -e "$OPTARG") ;;
	u) user=$OPTARG ;;
	m) memory=$OPTARG ;;
	t) limit=$OPTARG ;;
	l) logs=$OPTARG ;;
	*) exit 2 ;;
	esac
done
shift $((OPTIND - 1))
case "$user" in tester | root) ;; *) say "no such user: $user" && exit 2 ;; esac
case "$memory$limit" in *[!0-9]*) say "-m and -t take whole numbers" && exit 2 ;; esac
[ $# -gt 0 ] || { say "which command?" && exit 2; }
[ "$(id -u)" -eq 0 ] || { say "run this as root" && exit 1; }

"$here/packages.sh" limits
root=$("$here/root.sh" "$suite")
# Held by every machine that uses this root, so that root.sh does not remove it.
exec 7<"$root"
flock -s 7

# make_image FILE: the root, with the unit that runs the command, as a file system.
make_image() {
	local over
	over=$(mktemp -d "$base/image.XXXXXX")
	(
		unshare --mount -- "$BASH" -euo pipefail -s "$root" "$over" "$1" <<'INSIDE'
		root=$1 over=$2 image=$3
		mount --make-rprivate /
		mount -t tmpfs -o mode=0755 image "$over"
		mkdir "$over/upper" "$over/work" "$over/root"
		mount -t overlay overlay -o "lowerdir=$root,upperdir=$over/upper,workdir=$over/work" "$over/root"
		cd "$over/root"
		mkdir -p opt/test usr/local/lib/machine etc/systemd/system/sysinit.target.wants etc/systemd/system/multi-user.target.wants
		echo '/dev/ubda / ext4 defaults 0 0' >etc/fstab
		cat >usr/local/lib/machine/files <<'SH'
#!/bin/sh
set -e
shared=$(sed -n 's/.*hostshared=\([^ ]*\).*/\1/p' /proc/cmdline)
mkdir -p /run/machine
mount -t hostfs none /run/machine -o "$shared"
[ -b /dev/ubdb ] || exit 0
mount -o ro /dev/ubdb /opt/test
[ ! -d /opt/test/root ] || cp -a --no-preserve=ownership /opt/test/root/. /
SH
		cat >usr/local/lib/machine/command <<'SH'
#!/bin/bash
exec </dev/null >/dev/ttyS0 2>&1
cut -d ' ' -f 1 /proc/uptime >/run/machine/up
mapfile -d '' -t command </run/machine/command
user=$(cat /run/machine/user)
clean=(env -i --chdir=/ PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 TERM=dumb NO_COLOR=1
	AGENTCONNECT_TEST_MACHINE=uml "AGENTCONNECT_TEST_ROOT=$(cat /run/machine/release)")
code=0
case "$user" in
tester)
	# Only root can put a process below the manager; a scope is run by its caller and goes on
	# when the bus or the manager restarts.
	"${clean[@]}" HOME=/home/tester USER=tester LOGNAME=tester SHELL=/bin/bash \
		XDG_RUNTIME_DIR=/run/user/1000 DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/1000/bus \
		sh -c 'echo $$ >/sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service/init.scope/cgroup.procs && cd ~ &&
			exec setpriv --reuid tester --regid tester --init-groups systemd-run --user --scope --quiet --collect --unit=machine-command -- "$@"' \
		sh "${command[@]}" || code=$?
	;;
root) "${clean[@]}" HOME=/root USER=root LOGNAME=root SHELL=/bin/bash "${command[@]}" || code=$? ;;
esac
[ "$code" -eq 0 ] || journalctl --no-pager --quiet --boot --output=short-monotonic >/run/machine/journal 2>&1 || true
echo "$code" >/run/machine/status
SH
		chmod 0755 usr/local/lib/machine/files usr/local/lib/machine/command
		cat >etc/systemd/system/machine-files.service <<'UNIT'
[Unit]
Description=Put the files of this test in place
DefaultDependencies=no
RequiresMountsFor=/
After=systemd-remount-fs.service systemd-udev-settle.service
Before=sysinit.target
[Service]
Type=oneshot
ExecStart=/usr/local/lib/machine/files
StandardOutput=journal+console
StandardError=journal+console
UNIT
		cat >etc/systemd/system/machine-command.service <<'UNIT'
[Unit]
Description=Run the command of this test, and power off
Requires=user@1000.service machine-files.service
After=user@1000.service machine-files.service systemd-user-sessions.service dbus.service
SuccessAction=poweroff
FailureAction=poweroff
[Service]
Type=oneshot
ExecStart=/usr/local/lib/machine/command
UNIT
		ln -s ../machine-files.service etc/systemd/system/sysinit.target.wants/
		ln -s ../machine-command.service etc/systemd/system/multi-user.target.wants/
		mke2fs -q -t ext4 -O ^has_journal -m 0 -E root_owner=0:0 -d . "$image.part" 1536M >/dev/null
		mv -T "$image.part" "$image"
INSIDE
	)
	rmdir "$over"
}

image=$root.$(sha256sum <"${BASH_SOURCE[0]}" | cut -c1-16).ext4
if [ ! -e "$image" ]; then
	exec 9>"$base/image-lock"
	flock 9
	if [ ! -e "$image" ]; then
		start=$SECONDS
		say "making $image (once)"
		make_image "$image"
		say "made in $((SECONDS - start)) s"
	fi
	# Older ones that no machine uses.
	for old in "$base/$suite"-*.ext4; do
		[ "$old" = "$image" ] || [ ! -e "$old" ] || ! flock -n "$old" true || rm -f "$old"
	done
	exec 9>&-
fi
amx=$base/uml-amx-$(sha256sum <"$here/uml-amx.c" | cut -c1-16).so
if [ ! -e "$amx" ]; then
	cc -O2 -Wall -shared -fPIC -o "$amx.$$" "$here/uml-amx.c"
	mv -T "$amx.$$" "$amx"
fi
exec 6<"$image"
flock -s 6

state=$(mktemp -d /tmp/agentconnect-limits.XXXXXX)
[ -n "$logs" ] || logs=$state.log
trap 'rmdir "$state" 2>/dev/null || true' EXIT
# The machine dies with this script, whatever ends it, and a signal does not wait for it.
setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child=KILL --mount-proc -- \
	"$BASH" "$here/limits.sh" --inside "$image" "$amx" "$bind" "$user" "$memory" "$limit" "$logs" "$state" "$suite" "$@" 6<&- 7<&- &
machine=$!
stop() {
	kill -KILL "$machine" 2>/dev/null || true
	wait "$machine" 2>/dev/null || true
	exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM HUP
code=0
wait "$machine" || code=$?
exit "$code"
