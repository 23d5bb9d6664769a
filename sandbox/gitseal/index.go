// git's index, as far as it can hide changes from `git status`.

package gitseal

import (
	"bytes"
	"encoding/binary"
)

// Flags of an index entry.
const (
	assumeValid  = 1 << 15
	extendedFlag = 1 << 14
	skipWorktree = 1 << 14 // of the extended flags
)

// entry is one of an index. hides: it is marked assume-unchanged or skip-worktree; link: it is a
// repository of its own, in which git runs git.
type entry struct {
	name        []byte
	hides, link bool
}

// Where an entry says what it is, and what it says of a repository.
const (
	modeAt   = 24
	linkMode = 0o160000
)

// indexEntries calls f with each entry of an index (versions 2 to 4, gitformat-index(5)). hash is the
// length of an object's name in bytes.
func indexEntries(b []byte, hash int, f func(e entry)) {
	if len(b) < 12 || string(b[:4]) != "DIRC" {
		return
	}
	version, count := binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[8:])
	fixed := 40 + hash + 2
	var name []byte
	for rest := b[12:]; count > 0; count-- {
		if len(rest) < fixed {
			return
		}
		flags := binary.BigEndian.Uint16(rest[fixed-2:])
		size, hides := fixed, flags&assumeValid != 0
		if flags&extendedFlag != 0 && version >= 3 {
			if len(rest) < fixed+2 {
				return
			}
			hides = hides || binary.BigEndian.Uint16(rest[fixed:])&skipWorktree != 0
			size += 2
		}
		cut := len(name)
		if version == 4 {
			// How much of the name before is cut: a number in bytes whose top bits say that it goes on.
			cut = 0
			for ; size < len(rest) && rest[size]&0x80 != 0; size++ {
				cut = min((cut|int(rest[size]&0x7f))+1, len(b)) << 7
			}
			if size < len(rest) {
				cut |= int(rest[size])
			}
			size++
		}
		if size > len(rest) || cut > len(name) {
			return
		}
		end := bytes.IndexByte(rest[size:], 0)
		if end < 0 {
			return
		}
		name = append(name[:len(name)-cut], rest[size:size+end]...)
		f(entry{name: name, hides: hides, link: binary.BigEndian.Uint32(rest[modeAt:]) == linkMode})
		size += end + 1
		if version < 4 {
			size = (size + 7) &^ 7 // one to eight NULs up to a multiple of eight
		}
		if size > len(rest) {
			return
		}
		rest = rest[size:]
	}
}
