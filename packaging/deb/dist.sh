#!/usr/bin/env bash
# Makes the source tarball, with the modules that the build needs:
#
#	dist.sh [-o DIR] [-v VERSION]
#
#	-o  where it goes (default: dist/ of this tree)
#	-v  another version than debian/changelog's, for tests of upgrades
#
# Prints its path. In it is what git tracks and what it would (not ignored), less what was
# deleted, and vendor/, which git does not have. Every vendored module must stand in
# debian/copyright. Fetches modules (the build itself does not). One tree gives one tarball:
# order, times and owners are fixed.
set -euo pipefail
umask 022

say() { printf '%s\n' "dist: $*" >&2; }
top=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." && pwd -P)
out=$top/dist version=''
while getopts o:v: opt; do
	case "$opt" in
	o) out=$OPTARG ;;
	v) version=$OPTARG ;;
	*) exit 2 ;;
	esac
done
mkdir -p "$out"
out=$(cd "$out" && pwd -P)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
own=$(dpkg-parsechangelog -l "$top/debian/changelog" -S Version)
stamp=$(dpkg-parsechangelog -l "$top/debian/changelog" -S Timestamp)
version=${version:-$own}
name=agentconnect-sandbox-$version
mkdir "$work/$name"
cd "$top"
if git -c safe.directory="$top" rev-parse --is-inside-work-tree >/dev/null 2>&1; then
	git -c safe.directory="$top" ls-files -co --exclude-standard -z |
		while IFS= read -r -d '' file; do if [ -e "$file" ] || [ -L "$file" ]; then printf '%s\0' "$file"; fi; done >"$work/list"
else
	find . -mindepth 1 \( -path ./bin -o -path ./dist -o -path ./vendor -o -path ./debian/built \) -prune -o ! -type d -print0 >"$work/list"
fi
tar --null --no-recursion --verbatim-files-from -T "$work/list" -cf - | tar -C "$work/$name" -xf -
cd "$work/$name"
if [ "$version" != "$own" ]; then
	{
		printf 'agentconnect-sandbox (%s) UNRELEASED; urgency=medium\n\n  * A build for tests.\n\n -- %s  %s\n\n' "$version" \
			"$(dpkg-parsechangelog -S Maintainer)" "$(dpkg-parsechangelog -S Date)"
		cat debian/changelog
	} >changelog.new
	mv changelog.new debian/changelog
fi
# Debian's own Go may be too old, and /usr/local/go, where its own installer puts one, not in PATH.
GOTOOLCHAIN=local go list -m >/dev/null 2>&1 || PATH=/usr/local/go/bin:$PATH
GOFLAGS='' go mod vendor
# A module may come and go with a branch: what is said of one that is not here is left out.
awk -v RS= -v ORS='\n\n' '
	/^Files: vendor\// {
		n = split($0, line, "\n"); out = ""; here = 0
		for (i = 1; i <= n; i++) {
			name = line[i]; sub(/^Files:/, "", name); gsub(/^ +/, "", name)
			if (name ~ /^vendor\//) {
				sub(/\/\*$/, "", name)
				if (system("test -d " name) != 0) continue
				sub(/^(Files:)? +/, here++ ? "       " : "Files: ", line[i])
			}
			out = out (out == "" ? "" : "\n") line[i]
		}
		if (here) print out
		next
	}
	{ print }' debian/copyright >copyright.new
mv copyright.new debian/copyright
missing=0
while read -r module; do
	grep -q "^ *\(Files:\)\? *vendor/$module/\*$" debian/copyright || { say "debian/copyright has nothing for vendor/$module/*: add who holds its copyright and the licence" && missing=1; }
done < <(sed -n 's/^# \([^ ]*\) v.*/\1/p' vendor/modules.txt)
[ "$missing" -eq 0 ]
cd "$work"
tarball=$out/agentconnect-sandbox_$version.tar.xz
tar --sort=name --mtime="@$stamp" --owner=0 --group=0 --numeric-owner --mode=u+rw,go=rX -cf - "$name" | xz -6 -T1 >"$tarball.part"
mv "$tarball.part" "$tarball"
printf '%s\n' "$tarball"
