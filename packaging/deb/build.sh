#!/usr/bin/env bash
# Builds the package from the source tarball, offline:
#
#	build.sh [-a ARCH] [-o DIR] [-v VERSION] [-t TARBALL]
#
#	-a  for another architecture (amd64, arm64)
#	-o  where the .deb, .dsc and .changes go (default: dist/ of this tree)
#	-v  another version than debian/changelog's, for tests of upgrades
#	-t  from this tarball, made by dist.sh before
#
# Prints the path of the .deb. Go may be Debian's, if it is new enough, or any in PATH or
# /usr/local/go. Needs dpkg-dev and debhelper; needs neither root nor the network, but that
# dist.sh fetches modules. GOCACHE, where it is set, is used; else the build has its own.
set -euo pipefail
umask 022

top=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." && pwd -P)
say() { printf '%s\n' "deb: $*" >&2; }
arch=$(dpkg --print-architecture) out=$top/dist version=() tarball=''
while getopts a:o:v:t: opt; do
	case "$opt" in
	a) arch=$OPTARG ;;
	o) out=$OPTARG ;;
	v) version=(-v "$OPTARG") ;;
	t) tarball=$OPTARG ;;
	*) exit 2 ;;
	esac
done
for program in dpkg-buildpackage dh; do
	command -v "$program" >/dev/null || { say "$program is missing: sudo apt-get install dpkg-dev debhelper" && exit 1; }
done
[ -n "$tarball" ] || tarball=$("$top/packaging/deb/dist.sh" -o "$out" ${version[@]+"${version[@]}"})
mkdir -p "$out"
out=$(cd "$out" && pwd -P)

work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
tar -C "$work" -xf "$tarball"
source=$(echo "$work"/agentconnect-sandbox-*/)
cd "$source"
options=(--build=source,binary --no-sign --no-pre-clean "--host-arch=$arch")
# Debian's own Go counts where it is new enough.
if ! dpkg-checkbuilddeps >/dev/null 2>&1; then options+=(--build-profiles=pkg.agentconnect-sandbox.hostgo); fi
# A cross build needs no compiler for the other machine, which crossbuild-essential would ask.
[ "$arch" = "$(dpkg --print-architecture)" ] || options+=(-d)
if ! dpkg-buildpackage "${options[@]}" >"$work/log" 2>&1 </dev/null; then
	tail -n 60 "$work/log" >&2
	say "dpkg-buildpackage ${options[*]} failed: the reason is above"
	exit 1
fi
v=$(dpkg-parsechangelog -S Version)
cp "$work/log" "$out/agentconnect-sandbox_${v}_$arch.build"
mv "$work"/*.deb "$work"/*.dsc "$work"/*.tar.xz "$work"/*.changes "$work"/*.buildinfo "$out/"
printf '%s\n' "$out/agentconnect-sandbox_${v}_$arch.deb"
