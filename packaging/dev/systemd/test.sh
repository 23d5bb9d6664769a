#!/usr/bin/env bash
# Runs the tests that need a real user manager and not the product, in the test machine:
#
#	test.sh [-s bookworm|trixie] [-r REGEXP] [-b REGEXP] [-j FILE] [-l DIR]
#
#	-s  the machine's Debian release (default bookworm: systemd 252; trixie: systemd 257)
#	-r  only the tests of that name
#	-b  the benchmarks of that name, too
#	-j  append the tests' events to that file instead of printing what `go test -v` prints
#	-l  where the journal and the console go when something fails
#
# Needs Go, and root or sudo for the machine.
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"

suite=bookworm run='' bench='' events='' logs=''
while getopts s:r:b:j:l: opt; do
	case "$opt" in
	s) suite=$OPTARG ;;
	r) run=$OPTARG ;;
	b) bench=$OPTARG ;;
	j) events=$OPTARG ;;
	l) logs=$OPTARG ;;
	*) exit 2 ;;
	esac
done

# Like `go test`, each runs in its package's folder, next to the files it reads.
for package in units dbusctl cmd/internal/systemdtest; do
	mkdir -p "$site/$package"
	go test -c -o "$site/$package/test" "./$package"
	[ ! -d "$package/testdata" ] || cp -R "$package/testdata" "$site/$package/"
done
mkdir -p "$site/packaging"
cp -R packaging/systemd "$site/packaging/"
chmod -R u+w,go+rX "$site"

test_as() {
	local name=$suite
	[ "$1" = tester ] || name+=-$1
	# shellcheck disable=SC2016 # for the machine's shell
	in_machine "$2@$name" "$events" "$here/machine.sh" -s "$suite" -b "$site" -u "$1" ${logs:+-l "$logs-$1"} -- \
		sh -c 'cd "/opt/test/$1" && shift && exec ./test "$@"' sh "$2" -test.timeout=15m -test.run "$run" ${bench:+-test.bench "$bench" -test.benchmem}
}
test_as tester units
test_as tester dbusctl
# These look at the place from each kind of user.
for user in tester guest root; do
	test_as "$user" cmd/internal/systemdtest
done
exit "$failed"
