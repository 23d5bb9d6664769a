package logins

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// rest is how long a change may wait for the next one: an agent that writes all the time costs
// two looks a second.
const rest = 500 * time.Millisecond

// Watch settles whenever either side changes, until ctx ends. It sleeps in between.
func (s *Sync) Watch(ctx context.Context) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		s.log.Warn("changes of the login are seen at the next start alone", "reason", err)
		return
	}
	events := os.NewFile(uintptr(fd), "inotify")
	stop := context.AfterFunc(ctx, func() { events.Close() })
	defer stop()
	conn, err := events.SyscallConn()
	if err != nil {
		return // closed already
	}
	buf := make([]byte, 16<<10)
	for {
		// Either folder may have been replaced by another of its name.
		if conn.Control(func(fd uintptr) { s.watchFolders(int(fd)) }) != nil {
			return
		}
		began := time.Now()
		if err := s.Settle(); err != nil {
			s.log.Warn("the login could not be carried over", "reason", err)
		}
		spent := time.Since(began)
		// A queue that ran over is a change like any other.
		if _, err := events.Read(buf); err != nil {
			return // closed
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause(spent)):
		}
	}
}

// pause is how long to wait after a look that took so long. What is looked at may be large, and is
// the agent's: it does not get more of a processor of the host's by writing more.
func pause(spent time.Duration) time.Duration {
	return min(max(rest, 20*spent), time.Minute)
}

const changes = unix.IN_CLOSE_WRITE | unix.IN_MOVED_TO | unix.IN_MOVED_FROM | unix.IN_DELETE | unix.IN_MOVE_SELF | unix.IN_DELETE_SELF | unix.IN_ONLYDIR

func (s *Sync) watchFolders(fd int) {
	if _, err := unix.InotifyAddWatch(fd, filepath.Dir(s.hostPath()), changes); err != nil && !s.warned {
		s.warned = true
		s.log.Warn("a change of the host's login is seen at the next start alone", "reason", err)
	}
	// A pipe that the agent put there would hold an open that waits for a writer.
	dir, err := s.private.OpenFile(filepath.Dir(s.kind.File()), os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
	if err != nil {
		return // made with the next login
	}
	defer dir.Close()
	// By its descriptor: the name is the agent's to change.
	_, _ = unix.InotifyAddWatch(fd, fmt.Sprintf("/proc/self/fd/%d", dir.Fd()), changes)
}
