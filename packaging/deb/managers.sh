# The user managers that run, for the maintainer scripts: put in place of their word
# MANAGERS when the package is built.

# each_manager FUNCTION [ARG]…: calls it with `ctl` set for each one. A user's manager is
# spoken to as that user and through its own socket, so that no bus is needed and nothing of a
# user's is root's. Some user's trouble never fails the installation.
each_manager() {
	[ -d /run/systemd/system ] || return 0
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

# ctl ARG…: systemctl of the user in turn. A manager that hangs is left alone after a while.
ctl() {
	timeout --kill-after=5 120 setpriv --reuid="$uid" --regid="$gid" --clear-groups -- \
		env -i PATH=/usr/bin:/bin XDG_RUNTIME_DIR="/run/user/$uid" systemctl --user --quiet "$@" </dev/null
}

# After an upgrade the daemon is restarted; the agents that run go on and are adopted.
reload_units() {
	ctl daemon-reload || return 1
	[ -z "${1:-}" ] || ctl try-restart agentconnect.service
}

loaded() { [ "$(ctl show --property=LoadState --value "$1" 2>/dev/null)" = loaded ]; }

stop_all() {
	if loaded agentconnect.service; then ctl stop agentconnect.service || return 1; fi
	if loaded agentconnect.slice; then ctl stop agentconnect.slice || return 1; fi
}

# The probe's unit refuses to be stopped as long as its file says so.
forget_units() {
	ctl daemon-reload || return 1
	ctl stop agentconnect-probe.service 2>/dev/null || true
	ctl reset-failed 'agentconnect*' 'agent@*' 'agent-*.scope' 2>/dev/null || true
}

# What `agentconnect up` enabled for this user.
disable_unit() { ctl disable agentconnect.service 2>/dev/null || true; }

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
