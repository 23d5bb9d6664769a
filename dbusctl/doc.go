// Package dbusctl talks to the user's systemd over the user's bus. It is the one importer of
// D-Bus libraries: what fails silently there (a connection that died, a job whose result nobody
// read, a manager that was re-executed) is an error, or mended, here.
//
// It decides nothing: which units there are and what they look like, package units says; what
// to do about an error, its callers. It never starts a bus or a manager, and it connects to
// nothing but $XDG_RUNTIME_DIR/bus.
package dbusctl
