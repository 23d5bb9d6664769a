# The user managers that run, for the maintainer scripts: put in place of their word
# MANAGERS when the package is built.

# each_manager FUNCTION [ARG]…: calls it with `ctl` set for each one. A user's manager is
# spoken to as that user and through its own socket, so that no bus is needed and nothing of a
# user's is root's. Some user's trouble never fails the installation. In a chroot with the host's
# /run nobody is spoken to: those managers have the host's programs.
each_manager() {
	[ -d /run/systemd/system ] || return 0
	[ /proc/1/root -ef / ] || return 0
	for socket in /run/user/*/systemd/private; do
		[ -S "$socket" ] || continue
		uid=${socket#/run/user/}
		uid=${uid%%/*}
		case "$uid" in *[!0-9]*) continue ;; esac
		gid=$(getent passwd "$uid" | cut -d: -f4)
		[ -n "$gid" ] || continue
		"$@" || echo "agentconnect-sandbox: the service manager of user $uid did not follow; see: systemctl --user status agentconnect.service" >&2
	done
}

# ctl ARG…: systemctl of the user in turn. A manager that hangs is left alone after a while. That
# process is the user's, who may do with it and what it has open as he likes: so it has nothing of
# root's terminal, and no way to say anything there.
ctl() {
	setsid --wait timeout --kill-after=5 120 setpriv --reuid="$uid" --regid="$gid" --clear-groups -- \
		env -i PATH=/usr/bin:/bin XDG_RUNTIME_DIR="/run/user/$uid" systemctl --user --quiet "$@" </dev/null >/dev/null 2>&1
}

# After an upgrade the daemon is restarted; the agents that run go on and are adopted.
reload_units() {
	ctl daemon-reload || return 1
	[ -n "${1:-}" ] || return 0
	# However often it was started of late. One that failed stays so.
	ctl is-failed agentconnect.service || ctl reset-failed agentconnect.service || true
	ctl try-restart agentconnect.service
}

# Code 5 says that there is no such unit.
stop_all() {
	for unit in agentconnect.service agentconnect.slice; do
		ctl stop "$unit" || [ $? -eq 5 ] || return 1
	done
}

# The probe's unit refuses to be stopped as long as its file says so.
forget_units() {
	ctl daemon-reload || return 1
	ctl stop agentconnect-probe.service || true
	ctl reset-failed 'agentconnect*' 'agent@*' 'agent-*.scope' || true
}

# What `agentconnect up` enabled for this user.
disable_unit() { ctl disable agentconnect.service || true; }

# daemons: the pids of daemons of this very installation, those outside of managers included, and
# those whose file an upgrade has replaced; a container's own program lies in another root.
daemons() {
	{ find /proc/[0-9]*/exe -maxdepth 0 \( -lname /usr/bin/agentconnect -o -lname '/usr/bin/agentconnect (deleted)' \) 2>/dev/null || true; } |
		while read -r exe; do
			process=${exe%/exe}
			if [ "$process/root" -ef / ] && tr '\0' '\n' <"$process/cmdline" 2>/dev/null | grep -qx run; then
				echo "${process#/proc/}"
			fi
		done
}

# stop_daemons ends those that no manager keeps; their agents end with them.
stop_daemons() {
	left=$(daemons)
	for pid in $left; do kill -TERM "$pid" 2>/dev/null || true; done
	tries=0
	while [ -n "$left" ] && [ "$tries" -lt 45 ]; do
		sleep 1
		left=$(daemons)
		tries=$((tries + 1))
	done
	[ -z "$left" ] || echo "agentconnect-sandbox: still running after 45 s: pid $(echo $left)" >&2
}
