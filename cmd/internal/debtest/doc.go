// Package debtest tests the Debian package in a clean machine, as root and as the users
// there: packaging/dev/deb/test.sh builds and boots what it needs. It is tests alone, and
// knows of the product what its users do.
package debtest
