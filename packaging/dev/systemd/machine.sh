#!/usr/bin/env bash
# Boots the test machine, runs one command in it, and powers it off:
#
#	machine.sh [-s bookworm|trixie] [-R ROOT] [-b DIR] [-u tester|guest|root] [-i] [-l DIR] -- COMMAND [ARG]…
#
#	-s  the Debian release (default bookworm: systemd 252; trixie: systemd 257)
#	-R  another root than that release's, made of it
#	-b  a folder of the host, read-only at /opt/test in the machine; what lies in its folder root/
#	    is copied over the machine's root before it boots, as an installed package would be
#	-u  who runs the command (default tester: in a scope of the lingering user's manager;
#	    guest has no user manager; root is outside every unit)
#	-i  leave stdin connected, for a shell: machine.sh -i -- bash -l
#	-l  where the journal and the console go when the command fails (default: a new folder in /tmp)
#
# Exits with the command's status, or 125 when the machine did not come up.
#
# The machine is systemd-nspawn over a cached root with a fresh layer in memory, without a
# network, in a pid namespace and a cgroup of its own: however this script ends, nothing of the
# machine outlives it, and nothing has to be found and signalled by number. Several can run at
# once. Runs as root.
set -euo pipefail
umask 022

say() { printf '%s\n' "test machine: $*" >&2; }
here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P)

# ---- the inner half: pid 1 of a pid namespace, with a mount namespace ----

if [ "${1:-}" = --inside ]; then
	root=$2 bind=$3 user=$4 interactive=$5 logs=$6 state=$7
	shift 7
	mount --make-rprivate /
	mount -t tmpfs -o mode=0755 machine "$state"
	mkdir "$state/upper" "$state/work" "$state/root" "$state/shared"
	mount -t overlay overlay -o "lowerdir=$root,upperdir=$state/upper,workdir=$state/work" "$state/root"

	# Ready means: the lingering user's manager has reached its default.target. The machine says
	# so through a FIFO; the end of nspawn is said through the same one.
	mkfifo -m 0600 "$state/shared/events"
	exec 8<>"$state/shared/events"
	cat >"$state/root/etc/systemd/system/machine-ready.service" <<-'UNIT'
		[Unit]
		Description=Tell the host that the user manager is up
		Requires=user@1000.service
		After=user@1000.service systemd-user-sessions.service dbus.service
		[Service]
		Type=oneshot
		ExecStart=/bin/sh -c 'echo ready >/run/machine/events'
		[Install]
		WantedBy=multi-user.target
	UNIT
	mkdir -p "$state/root/etc/systemd/system/multi-user.target.wants" "$state/root/opt/test"
	ln -s ../machine-ready.service "$state/root/etc/systemd/system/multi-user.target.wants/"

	if [ -n "$bind" ] && [ -d "$bind/root" ]; then cp -a --no-preserve=ownership "$bind/root/." "$state/root/"; fi

	# Not the wall clock: it may be set meanwhile.
	now() { local up; read -r up _ </proc/uptime; printf "%s" "${up/./}"; }
	began=$(now)
	since() { local t=$(($(now) - began)); printf "%d.%02d s" $((t / 100)) $((t % 100)); }
	binds=(--bind="$state/shared:/run/machine")
	[ -z "$bind" ] || binds+=(--bind-ro="$bind:/opt/test")
	(
		SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 SYSTEMD_NSPAWN_API_VFS_WRITABLE=1 SYSTEMD_SECCOMP=0 \
			systemd-nspawn --quiet --register=no --keep-unit --private-network --machine="$(basename "$state")" \
			--directory="$state/root" --boot --console=pipe --resolv-conf=off --timezone=off --link-journal=no \
			"${binds[@]}" >"$state/console" 2>&1 </dev/null 8>&- || true
		echo gone >&8
	) &
	owner=$!

	event=
	read -r -t 90 -u 8 event || true
	if [ "$event" != ready ]; then
		tail -n 40 "$state/console" >&2
		say "it did not come up (${event:-no word after 90 s}): its console is above"
		exit 125
	fi
	say "up after $(since)"

	# nspawn is the only child of its owner, the machine's init the only one of nspawn.
	leader=$owner
	for below in systemd-nspawn init; do
		leader=$(cat "/proc/$leader/task/$leader/children")
		leader=${leader%% *}
		case "$leader" in '' | *[!0-9]* | 0 | 1) say "no $below: '$leader'" && exit 125 ;; esac
	done
	inside=(nsenter --target "$leader" --mount --uts --ipc --net --pid --cgroup --root)
	clean=(env -i --chdir=/ PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 "TERM=${TERM:-dumb}"
		"AGENTCONNECT_TEST_MACHINE=$(basename "$root")")
	case "$user" in
	tester)
		# From outside the manager's cgroups an ordinary user cannot be moved into a scope, so
		# root puts the process where the manager itself is. A scope is run by its caller: it
		# and its output go on when the bus or the manager restarts.
		run=("${inside[@]}" "${clean[@]}" HOME=/home/tester USER=tester LOGNAME=tester SHELL=/bin/bash
			XDG_RUNTIME_DIR=/run/user/1000 DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/1000/bus
			sh -c 'echo $$ >/sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service/init.scope/cgroup.procs && cd ~ &&
				exec setpriv --reuid tester --regid tester --init-groups systemd-run --user --scope --quiet --collect --unit=machine-command -- "$@"' sh "$@")
		;;
	guest)
		run=("${inside[@]}" "${clean[@]}" HOME=/home/guest USER=guest LOGNAME=guest SHELL=/bin/bash
			sh -c 'cd ~ && exec setpriv --reuid guest --regid guest --init-groups "$@"' sh "$@")
		;;
	root) run=("${inside[@]}" "${clean[@]}" HOME=/root USER=root LOGNAME=root SHELL=/bin/bash "$@") ;;
	esac
	code=0
	if [ "$interactive" = yes ]; then
		"${run[@]}" 8>&- || code=$?
	else
		"${run[@]}" </dev/null 8>&- || code=$?
	fi
	say "the command ended with $code after $(since)"

	if [ "$code" -ne 0 ]; then
		mkdir -p "$logs"
		"${inside[@]}" journalctl --no-pager --quiet --boot --output=short-monotonic >"$logs/journal" 2>&1 </dev/null 8>&- || true
		cp "$state/console" "$logs/console"
		tail -n "${MACHINE_JOURNAL_LINES:-60}" "$logs/journal" >&2
		say "the end of the journal is above, all of it in $logs/journal"
	fi
	# Orderly, so that what a shutdown shows is in the console. Whatever is left when this script
	# ends, ends with its pid namespace.
	"${inside[@]}" systemctl --no-block poweroff >/dev/null 2>&1 </dev/null 8>&- || true
	event=
	while read -r -t 20 -u 8 event; do
		[ "$event" != gone ] || break
	done
	[ "$event" = gone ] || say "it did not power off within 20 s: killed"
	say "off after $(since)"
	exit "$code"
fi

# ---- the outer half ----

suite=bookworm root='' bind='' user=tester interactive=no logs=''
while getopts s:R:b:u:il: opt; do
	case "$opt" in
	s) suite=$OPTARG ;;
	R) root=$(readlink -e "$OPTARG") ;;
	b) bind=$(readlink -e "$OPTARG") ;;
	u) user=$OPTARG ;;
	i) interactive=yes ;;
	l) logs=$OPTARG ;;
	*) exit 2 ;;
	esac
done
shift $((OPTIND - 1))
case "$user" in tester | guest | root) ;; *) say "no such user: $user" && exit 2 ;; esac
[ $# -gt 0 ] || { say "which command?" && exit 2; }
[ "$(id -u)" -eq 0 ] || { say "run this as root" && exit 1; }

"$here/packages.sh"
[ -n "$root" ] || root=$("$here/root.sh" "$suite")
# Held by every machine that uses this root, so that root.sh does not remove it.
exec 7<"$root"
flock -s 7

cgroup2=$(findmnt --noheadings --first-only --types cgroup2 --output TARGET) || { say "no cgroup2 is mounted here" && exit 1; }
state=$(mktemp -d /tmp/agentconnect-machine.XXXXXX)
cgroup=$cgroup2/$(basename "$state")
[ -n "$logs" ] || logs=$state.log
mkdir "$cgroup"
child=
cleanup() {
	trap - EXIT INT TERM HUP
	# Its end is the end of the pid namespace; until it is waited for, the number is its own.
	if [ -n "$child" ]; then
		kill -KILL "$child" 2>/dev/null || true
		wait "$child" 2>/dev/null || true
	fi
	# A killed namespace takes a moment to empty its cgroups.
	for _ in 1 2 3 4 5 6 7 8 9 10; do
		find "$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null || true
		[ -d "$cgroup" ] || break
		sleep 0.1
	done
	rmdir "$state" 2>/dev/null || true
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
# In the background, for bash runs no trap while it waits for a command in the foreground. The
# death signal is for the end that no trap sees.
setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child=KILL --mount-proc -- \
	sh -c 'echo 0 >"$1/cgroup.procs" && shift && exec "$@"' sh "$cgroup" \
	"$BASH" "$here/machine.sh" --inside "$root" "$bind" "$user" "$interactive" "$logs" "$state" "$@" 7<&- <&0 &
child=$!
code=0
wait "$child" || code=$?
child=
exit "$code"
