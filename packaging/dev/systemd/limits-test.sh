#!/usr/bin/env bash
# Runs the tests of limits and accounting:
#
#	limits-test.sh [-s bookworm|trixie] [-p real|missing] [-r REGEXP] [-t SECONDS] [-j FILE] [-l DIR]
#
#	-s  the machine's Debian release (default bookworm: systemd 252; trixie: systemd 257)
#	-p  one part alone: in the machine where limits are real, or in the one whose user manager
#	    has no controllers (default: both)
#	-r  only the tests of that name
#	-t  the longest that the machine with real limits may take (default 1800): alone it takes four minutes,
#	    beside others ten times that
#	-j  append the tests' events to that file instead of printing what `go test -v` prints
#	-l  where the journal and the console go when something fails
#
# Builds the product and the tests into a temporary folder, boots a machine for each part with
# the product installed as the package would, and exits with the tests' status. Needs Go, and
# root or sudo for the machine.
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"

suite=bookworm parts=(real missing) run='' time=1800 events='' logs=''
while getopts s:p:r:t:j:l: opt; do
	case "$opt" in
	s) suite=$OPTARG ;;
	p) parts=("$OPTARG") ;;
	r) run=$OPTARG ;;
	t) time=$OPTARG ;;
	j) events=$OPTARG ;;
	l) logs=$OPTARG ;;
	*) exit 2 ;;
	esac
done

install_product
go test -c -o "$site/limits.test" ./cmd/internal/limitstest

for part in "${parts[@]}"; do
	arguments=(-test.timeout=30m)
	[ -z "$run" ] || arguments+=(-test.run "$run")
	case "$part" in
	real) machine=limits.sh name=$suite-limits limit=(-t "$time") arguments+=(-test.skip '^TestMissing') ;;
	missing) machine=machine.sh name=$suite limit=() arguments+=(-test.run "${run:-^TestMissing}") ;;
	*) say "no such part: $part" && exit 2 ;;
	esac
	in_machine "cmd/internal/limitstest@$name" "$events" "$here/$machine" ${limit[@]+"${limit[@]}"} -s "$suite" -b "$site" ${logs:+-l "$logs-$part"} -- \
		/opt/test/limits.test "${arguments[@]}"
done
exit "$failed"
