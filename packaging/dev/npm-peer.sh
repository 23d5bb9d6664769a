#!/usr/bin/env bash
# Installs the sandbox-runtime package that `make bench` measures the network beside, and that
# the tests run inside as the sandbox of Claude Code that it is, pinned by
# peer/package-lock.json, below ~/.cache/agentconnect-dev/peer, and prints the path of its command.
# No install script runs. Where npm or the registry is missing it says why and fails: the
# benchmark leaves that column out then.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
base=${XDG_CACHE_HOME:-$HOME/.cache}/agentconnect-dev/peer
set_dir=$base/$(cat "$here/peer/package.json" "$here/peer/package-lock.json" | sha256sum | cut -c1-16)
if [ ! -e "$set_dir/complete" ]; then
	command -v npm >/dev/null || { echo "npm-peer: npm is missing: apt-get install nodejs npm" >&2 && exit 1; }
	mkdir -p "$base"
	exec 9>"$base/lock"
	flock 9
	rm -rf "$set_dir"
	mkdir "$set_dir"
	cp "$here/peer/package.json" "$here/peer/package-lock.json" "$set_dir/"
	if ! (cd "$set_dir" && npm ci --ignore-scripts --no-audit --no-fund --no-progress) >"$set_dir/npm.log" 2>&1 </dev/null 9>&-; then
		cat "$set_dir/npm.log" >&2
		exit 1
	fi
	touch "$set_dir/complete"
fi
ln -sfn "$(basename "$set_dir")" "$base/current.new"
mv -T "$base/current.new" "$base/current" # where the tests look
printf '%s\n' "$set_dir/node_modules/.bin/srt"
