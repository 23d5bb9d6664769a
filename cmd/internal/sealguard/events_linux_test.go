package sealguard

import (
	"encoding/binary"
	"testing"
)

func event(wd int32, mask uint32, name string) []byte {
	b := make([]byte, inotifyHead, inotifyHead+len(name))
	binary.NativeEndian.PutUint32(b, uint32(wd))
	binary.NativeEndian.PutUint32(b[4:], mask)
	binary.NativeEndian.PutUint32(b[12:], uint32(len(name)))
	return append(b, name...)
}

func TestEventsAreReadWholeAndACutOneCountsAsEverything(t *testing.T) {
	var names []string
	b := append(event(1, 2, "config\x00\x00"), event(-1, 0x4000, "")...)
	yes := parseEvents(b, func(wd int, mask uint32, name string) bool {
		names = append(names, name)
		return wd == -1 && mask == 0x4000
	})
	if !yes || len(names) != 2 || names[0] != "config" || names[1] != "" {
		t.Errorf("%v %q", yes, names)
	}
	if !parseEvents(b[:20], func(int, uint32, string) bool { return false }) {
		t.Error("a cut event counts as none")
	}
}

func FuzzEvents(f *testing.F) {
	f.Add(event(1, 2, "config\x00\x00"))
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, b []byte) {
		n := 0
		parseEvents(b, func(_ int, _ uint32, name string) bool { n += inotifyHead + len(name); return false })
		if n > len(b) {
			t.Errorf("%d bytes of events in %d", n, len(b))
		}
	})
}
