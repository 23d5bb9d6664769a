#!/usr/bin/env bash
# Makes a signed apt repository, a folder for any web server:
#
#	repo.sh [-k FINGERPRINT] [-d DIR] [-u URL] DIR DEB…
#
#	-k  sign with this secret key of gpg's keyring
#	-d  without -k: the folder of a key of its own, made when it is missing (default DIR.key; keep it)
#	-u  where the folder will be served (default: its own path, as file:)
#
# Debs of several versions and architectures go together. Beside the packages lie the public key
# (agentconnect-archive-keyring.pgp) and agentconnect.sources, which names it with Signed-By.
# Needs apt-utils and gpg.
set -euo pipefail
umask 022

say() { printf '%s\n' "repo: $*" >&2; }
key='' keys='' url=''
while getopts k:d:u: opt; do
	case "$opt" in
	k) key=$OPTARG ;;
	d) keys=$OPTARG ;;
	u) url=$OPTARG ;;
	*) exit 2 ;;
	esac
done
shift $((OPTIND - 1))
[ $# -ge 2 ] || { say "usage: repo.sh [-k FINGERPRINT] [-d DIR] [-u URL] DIR DEB…" && exit 2; }
for program in apt-ftparchive gpg; do
	command -v "$program" >/dev/null || { say "$program is missing: sudo apt-get install apt-utils gpg" && exit 1; }
done
mkdir -p "$1"
dir=$(cd "$1" && pwd -P)
shift
gpg=(gpg --batch --quiet)
if [ -z "$key" ]; then
	keys=${keys:-$dir.key}
	mkdir -p -m 0700 "$keys"
	gpg+=(--homedir "$keys")
	# Its agent would outlive us.
	trap 'GNUPGHOME=$keys gpgconf --kill gpg-agent 2>/dev/null || true' EXIT
	if [ ! -s "$keys/fingerprint" ]; then
		say "making a signing key in $keys: keep it, for whoever installed from here trusts it alone"
		"${gpg[@]}" --passphrase '' --quick-gen-key 'AgentConnect archive <maintainers@agentconnect.md>' ed25519 sign 5y
		"${gpg[@]}" --with-colons --list-secret-keys | sed -n 's/^fpr:*\([0-9A-F]*\):$/\1/p' | head -n 1 >"$keys/fingerprint"
	fi
	key=$(cat "$keys/fingerprint")
fi

pool=pool/main/a/agentconnect-sandbox
mkdir -p "$dir/$pool"
cp --update "$@" "$dir/$pool/"
cd "$dir"
rm -rf dists.new
architectures=(amd64 arm64)
for arch in "${architectures[@]}"; do
	binary=dists.new/stable/main/binary-$arch
	mkdir -p "$binary"
	apt-ftparchive --arch "$arch" packages "$pool" >"$binary/Packages"
	gzip -9nk "$binary/Packages"
done
apt-ftparchive -o APT::FTPArchive::Release::Origin=AgentConnect -o APT::FTPArchive::Release::Label=AgentConnect \
	-o APT::FTPArchive::Release::Suite=stable -o APT::FTPArchive::Release::Codename=stable \
	-o APT::FTPArchive::Release::Components=main -o "APT::FTPArchive::Release::Architectures=${architectures[*]}" \
	release dists.new/stable >Release.new
mv Release.new dists.new/stable/Release
"${gpg[@]}" --yes --local-user "$key" --clearsign --output dists.new/stable/InRelease dists.new/stable/Release
"${gpg[@]}" --yes --local-user "$key" --armor --detach-sign --output dists.new/stable/Release.gpg dists.new/stable/Release
"${gpg[@]}" --export "$key" >agentconnect-archive-keyring.pgp.new
mv agentconnect-archive-keyring.pgp.new agentconnect-archive-keyring.pgp
cat >agentconnect.sources <<SOURCES
Types: deb
URIs: ${url:-file:$dir}
Suites: stable
Components: main
Signed-By: /usr/share/keyrings/agentconnect-archive-keyring.pgp
SOURCES
rm -rf dists.old
[ ! -e dists ] || mv dists dists.old
mv dists.new dists
rm -rf dists.old
say "$dir: $(ls "$pool" | tr '\n' ' ')signed by $key"
