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

// hiddenEntries counts the entries of an index (versions 2 to 4, gitformat-index(5)) that are
// marked assume-unchanged or skip-worktree. hash is the length of an object's name in bytes.
func hiddenEntries(b []byte, hash int) int {
	if len(b) < 12 || string(b[:4]) != "DIRC" {
		return 0
	}
	version, count := binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[8:])
	fixed := 40 + hash + 2
	hidden := 0
	for rest := b[12:]; count > 0; count-- {
		if len(rest) < fixed {
			return hidden
		}
		flags := binary.BigEndian.Uint16(rest[fixed-2:])
		size, hides := fixed, flags&assumeValid != 0
		if flags&extendedFlag != 0 && version >= 3 {
			if len(rest) < fixed+2 {
				return hidden
			}
			hides = hides || binary.BigEndian.Uint16(rest[fixed:])&skipWorktree != 0
			size += 2
		}
		if hides {
			hidden++
		}
		if version == 4 {
			// How much of the name before is cut, as a number of bytes whose top bits say
			// that it goes on.
			for size < len(rest) && rest[size]&0x80 != 0 {
				size++
			}
			size++
		}
		if size > len(rest) {
			return hidden
		}
		end := bytes.IndexByte(rest[size:], 0)
		if end < 0 {
			return hidden
		}
		size += end + 1
		if version < 4 {
			size = (size + 7) &^ 7 // one to eight NULs up to a multiple of eight
		}
		if size > len(rest) {
			return hidden
		}
		rest = rest[size:]
	}
	return hidden
}
