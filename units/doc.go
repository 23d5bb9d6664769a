// Package units says what the product's systemd units are called, which unit files ship, and
// which properties a transient unit gets on which version of systemd.
//
// It is pure: functions of their arguments. It talks to no bus (dbusctl does), reads no
// configuration, and starts nothing. It holds no secret, and none may be given to it: systemd
// shows a unit's properties to everyone on the bus.
package units
