#!/usr/bin/env bash
# Installs the ACP runtimes that the integration tests run, pinned by runtimes/package-lock.json,
# below ~/.cache/agentconnect-dev/runtimes, and prints the folder that holds their commands
# (claude-agent-acp, codex, codex-acp, gemini, opencode, and a node that is new enough for them).
#
# Does nothing when that lock file's set is already there. No install script of a package runs,
# whatever npm's version: node comes as its platform package (the `node` package only downloads
# that), and opencode's script, which links its platform binary into place, is called by name.
set -euo pipefail

say() { printf '%s\n' "npm-runtimes: $*" >&2; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
if [ "$(id -u)" -eq 0 ]; then
	say "run this as an ordinary user: the runtimes belong below that user's home"
	exit 1
fi

base=${XDG_CACHE_HOME:-$HOME/.cache}/agentconnect-dev/runtimes
key=$(cat "$here/runtimes/package.json" "$here/runtimes/package-lock.json" "${BASH_SOURCE[0]}" | sha256sum | cut -c1-16)
set_dir=$base/$key
mkdir -p "$base"

link_current() {
	ln -sfn "$key" "$base/current.new"
	mv -T "$base/current.new" "$base/current"
	printf '%s\n' "$base/current/bin"
}
if [ -e "$set_dir/complete" ]; then
	link_current
	exit 0
fi

exec 9>"$base/lock"
flock 9
if [ -e "$set_dir/complete" ]; then
	link_current
	exit 0
fi

command -v npm >/dev/null || { say "npm is missing: apt-get install nodejs npm" && exit 1; }
say "installing the ACP runtimes (about 1.3 GB unpacked) to $set_dir"
rm -rf "$set_dir"
mkdir -p "$set_dir/bin"
cp "$here/runtimes/package.json" "$here/runtimes/package-lock.json" "$set_dir/"
# install, not ci: the lock file cannot name every platform's optional packages, as some of them
# are absent from some registries. What it names is held to its version and checksum all the same.
log=$set_dir/npm.log
if ! (cd "$set_dir" && npm install --no-save --ignore-scripts --no-audit --no-fund --no-progress --fetch-retries=4) >"$log" 2>&1 </dev/null 9>&-; then
	cat "$log" >&2
	say "npm install failed: the reason is above"
	exit 1
fi

case "$(uname -m)" in
x86_64) arch=x64 ;;
aarch64) arch=arm64 ;;
*) say "no Node package for $(uname -m)" && exit 1 ;;
esac
node=$set_dir/node_modules/node-linux-$arch/bin/node
[ -x "$node" ] || { say "$node is missing: npm left the optional package out; see $log" && exit 1; }
for command in claude-agent-acp codex codex-acp gemini opencode; do
	ln -s "../node_modules/.bin/$command" "$set_dir/bin/$command"
done
ln -s "../node_modules/node-linux-$arch/bin/node" "$set_dir/bin/node"

(cd "$set_dir/node_modules/opencode-ai" && "$node" postinstall.mjs) >>"$log" 2>&1 </dev/null 9>&- ||
	{ cat "$log" >&2 && say "opencode's postinstall failed: the reason is above" && exit 1; }

# A set counts only when its programs run.
PATH=$set_dir/bin:$PATH
case "$(node --version)" in v2[2-9].* | v[3-9][0-9].*) ;; *) say "node --version says $(node --version): want 22 or later" && exit 1 ;; esac
for command in claude-agent-acp codex gemini opencode; do
	"$command" --version >>"$log" 2>&1 </dev/null 9>&- || { say "$command --version failed: see $log" && exit 1; }
done
codex-acp --help >>"$log" 2>&1 </dev/null 9>&- || { say "codex-acp --help failed: see $log" && exit 1; }
touch "$set_dir/complete"
link_current

# Older sets are 1.3 GB each.
for old in "$base"/*/; do
	old=${old%/}
	case "$old" in "$set_dir" | "$base/current") ;; *) rm -rf "$old" ;; esac
done
