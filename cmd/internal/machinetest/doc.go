// Package machinetest tests the installed product on a machine with systemd: through the
// command line, systemctl and the agents' sockets, as the people who use it do. It holds
// tests alone. They run inside the project's test machine (packaging/dev/systemd/product.sh),
// some as the ordinary user tester, those that break the machine or end the user's session
// as root; anywhere else they skip and say why.
package machinetest
