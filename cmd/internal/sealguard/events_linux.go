package sealguard

import (
	"bytes"
	"encoding/binary"
)

// inotifyHead is the size in bytes of struct inotify_event without its name.
const inotifyHead = 16

// parseEvents reads a buffer of inotify events and reports whether f said yes to any.
func parseEvents(b []byte, f func(wd int, mask uint32, name string) bool) (yes bool) {
	for len(b) >= inotifyHead {
		wd := int(int32(binary.NativeEndian.Uint32(b)))
		mask := binary.NativeEndian.Uint32(b[4:])
		size := int(binary.NativeEndian.Uint32(b[12:]))
		if size > len(b)-inotifyHead {
			return true // cut short: take it for everything
		}
		name := b[inotifyHead : inotifyHead+size]
		if i := bytes.IndexByte(name, 0); i >= 0 {
			name = name[:i]
		}
		yes = f(wd, mask, string(name)) || yes
		b = b[inotifyHead+size:]
	}
	return yes
}
