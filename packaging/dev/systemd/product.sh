#!/usr/bin/env bash
# Runs the tests of the installed product, in the test machine:
#
#	product.sh [-s bookworm|trixie] [-p user|root] [-r REGEXP] [-x REGEXP] [-b REGEXP] [-j FILE] [-l DIR]
#
#	-s  the machine's Debian release (default bookworm: systemd 252; trixie: systemd 257)
#	-p  one part alone: the tests that run as the ordinary user, or those that break the
#	    machine or end the user's session, as root (default: both)
#	-r  only the tests of that name
#	-x  not the tests of that name
#	-b  benchmarks of that name instead of tests
#	-j  append the tests' events to that file instead of printing what `go test -v` prints
#	-l  where the journal and the console go when something fails
#
# Builds the product and the tests (cmd/internal/machinetest) into a temporary folder, boots a
# machine for each part with the product installed as the package would, and exits with the
# tests' status. AGENTCONNECT_TEST_CHAOS=300s makes the chaos longer,
# AGENTCONNECT_TEST_SEED=N repeats one. Needs Go, and root or sudo for the machine.
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"

suite=bookworm parts=(user root) run='' without='' bench='' events='' logs=''
while getopts s:p:r:x:b:j:l: opt; do
	case "$opt" in
	s) suite=$OPTARG ;;
	p) parts=("$OPTARG") ;;
	r) run=$OPTARG ;;
	x) without=$OPTARG ;;
	b) bench=$OPTARG ;;
	j) events=$OPTARG ;;
	l) logs=$OPTARG ;;
	*) exit 2 ;;
	esac
done

install_product
# What an update finds running.
older=$site/root/usr/libexec/agentconnect-older
mkdir -p "$older"
go build -trimpath -ldflags "-s -w -X $module/cmd/internal/version.Version=old" -o "$older/" ./cmd/agentconnect-supervisor
cp "$site"/root/usr/libexec/agentconnect-sandbox/agentconnect-{launch,guest} "$older/"
go test -c -o "$site/machinetest.test" ./cmd/internal/machinetest

passed=()
while IFS= read -r -d '' variable; do
	case "$variable" in AGENTCONNECT_TEST_MACHINE=*) ;; AGENTCONNECT_TEST_*) passed+=("$variable") ;; esac
done < <(env -0)
for part in "${parts[@]}"; do
	arguments=(-test.timeout=30m)
	case "$part" in
	user) user=tester name=$suite arguments+=(-test.skip "^TestRoot${without:+|$without}") ;;
	root) user=root name=$suite-root arguments+=(-test.run '^TestRoot' ${without:+-test.skip "$without"}) ;;
	*) say "no such part: $part" && exit 2 ;;
	esac
	[ -z "$run" ] || arguments+=(-test.run "$run")
	[ -z "$bench" ] || arguments+=(-test.run '^$' -test.bench "$bench" -test.benchtime=1x)
	in_machine "cmd/internal/machinetest@$name" "$events" "$here/machine.sh" -s "$suite" -b "$site" -u "$user" ${logs:+-l "$logs-$part"} -- \
		env ${passed[@]+"${passed[@]}"} /opt/test/machinetest.test "${arguments[@]}"
done
exit "$failed"
