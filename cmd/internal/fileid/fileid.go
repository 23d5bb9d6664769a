// Package fileid tells whether a file is still what it was when it was read.
package fileid

import (
	"time"

	"golang.org/x/sys/unix"
)

// settled is how old a file's last change must be for what was read to be kept: a change right
// after it may leave the same time.
const settled = 2 * time.Second

// ID is different for each content of a path, once it is settled. It is taken before the file is
// read: a change in between is seen by the next look.
type ID struct {
	dev, ino        uint64
	size            int64
	changed, status unix.Timespec
}

// Of is that of a file by its status.
func Of(st *unix.Stat_t) ID {
	return ID{dev: uint64(st.Dev), ino: st.Ino, size: st.Size, changed: st.Mtim, status: st.Ctim} //nolint:unconvert // not everywhere of that type
}

// Settled reports whether what was read may be kept.
func (id ID) Settled() bool { return time.Since(time.Unix(id.status.Unix())) > settled }
