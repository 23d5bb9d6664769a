// Package limitstest tests limits and accounting with the installed product: through the
// command line, systemctl and the kernel's own counters. It holds tests alone. Most need
// control groups with controllers, which the machine of packaging/dev/systemd/limits.sh has;
// those about a missing controller run where the user manager has none, in machine.sh's.
// packaging/dev/systemd/limits-test.sh runs all of them; anywhere else they skip and say why.
package limitstest
