#!/usr/bin/env bash
# Installs what builds and boots the test machine, where it is missing; with the word limits, the
# one with real limits; with the word emulated, the one with AppArmor. Runs as root.
set -euo pipefail

missing=()
command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
command -v systemd-nspawn >/dev/null || missing+=(systemd-container)
for program in unshare nsenter setpriv flock findmnt; do
	command -v "$program" >/dev/null || { missing+=(util-linux) && break; }
done
if [ "${1:-}" = limits ]; then
	command -v linux.uml >/dev/null || missing+=(user-mode-linux)
	command -v mke2fs >/dev/null || missing+=(e2fsprogs)
	command -v cc >/dev/null || missing+=(gcc libc6-dev)
fi
if [ "${1:-}" = emulated ]; then
	command -v qemu-system-x86_64 >/dev/null || missing+=(qemu-system-x86)
	command -v mke2fs >/dev/null || missing+=(e2fsprogs)
fi
[ ${#missing[@]} -gt 0 ] || exit 0

printf '%s\n' "test machine: installing ${missing[*]}" >&2
apt=(env DEBIAN_FRONTEND=noninteractive apt-get -y -q -o DPkg::Lock::Timeout=600)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for try in 1 2 3 4 5; do
	if "${apt[@]}" install --no-install-recommends "${missing[@]}" >"$log" 2>&1 </dev/null; then exit 0; fi
	[ "$try" -eq 1 ] || sleep 5
	"${apt[@]}" update >>"$log" 2>&1 </dev/null || true
done
cat "$log" >&2
printf '%s\n' "test machine: apt-get install ${missing[*]} failed: the reason is above" >&2
exit 1
