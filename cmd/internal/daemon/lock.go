package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// LockedError: another daemon holds ROOT.
type LockedError struct {
	Path string
	PID  int // 0: not known
}

func (e *LockedError) Error() string {
	who := "another daemon"
	if e.PID != 0 {
		who += fmt.Sprintf(" (pid %d)", e.PID)
	}
	return fmt.Sprintf("%s: %s runs already; end it with `agentconnect down` (or stop the npm package's AgentConnect) first", e.Path, who)
}

// lockRecord is what we write into daemon.lock. Program tells our lock from the one
// of npm's AgentConnect, which shares ROOT and knows no flock.
type lockRecord struct {
	PID     int    `json:"pid"`
	Program string `json:"program"`
}

const lockProgram = "agentconnect-sandbox"

// dyingWait is how long a start waits for a daemon that may be ending.
const dyingWait = 500 * time.Millisecond

// maxLock bounds what is read of a lock file, bytes.
const maxLock = 4 << 10

// takeLock takes ROOT/daemon.lock for the life of the returned file. The kernel gives
// our own lock back when its holder dies; a live holder of the other kind is
// recognised by the pid in the file.
func takeLock(root string) (*os.File, error) {
	path := filepath.Join(root, "daemon.lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, cannotWrite(path, err)
	}
	err = flock(f)
	if rec, _ := readLock(f); errors.Is(err, syscall.EWOULDBLOCK) && rec.PID > 0 {
		// One that was killed just now still holds it until the kernel has taken it apart.
		ctx, cancel := context.WithTimeout(context.Background(), dyingWait)
		if waitProcess(ctx, rec.PID) == nil {
			err = flock(f)
		}
		cancel()
	}
	if err != nil {
		defer f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			rec, _ := readLock(f)
			return nil, &LockedError{Path: path, PID: rec.PID}
		}
		return nil, fmt.Errorf("lock %s: %w; is it on a network file system? choose a local directory with --root", path, err)
	}
	rec, written := readLock(f)
	if rec.Program != lockProgram && rec.PID > 0 && rec.PID != os.Getpid() && alive(rec.PID) && !bornAfter(rec.PID, written) {
		f.Close()
		return nil, &LockedError{Path: path, PID: rec.PID}
	}
	raw, err := json.Marshal(lockRecord{PID: os.Getpid(), Program: lockProgram})
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = f.WriteAt(append(raw, '\n'), 0)
	}
	if err != nil {
		f.Close()
		return nil, cannotWrite(path, err)
	}
	return f, nil
}

// Holder returns the pid of the daemon that holds ROOT by our own lock, 0 if none does.
// It looks at the file and the process only: trying the lock would hold it for a moment,
// and a daemon that starts in that moment would take us for its rival.
func Holder(root string) int {
	f, err := os.Open(filepath.Join(root, "daemon.lock"))
	if err != nil {
		return 0
	}
	defer f.Close()
	rec, written := readLock(f)
	if rec.Program != lockProgram || rec.PID == 0 || !alive(rec.PID) || bornAfter(rec.PID, written) {
		return 0
	}
	return rec.PID
}

// WaitEnded returns when the daemon that holds root has ended, lock and all.
func WaitEnded(ctx context.Context, root string) error {
	pid := Holder(root)
	if pid == 0 {
		return nil
	}
	return waitProcess(ctx, pid)
}

func flock(f *os.File) error {
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}

// readLock reads either kind of content: our JSON, other JSON with a pid, or a number.
func readLock(f *os.File) (lockRecord, time.Time) {
	raw, err := io.ReadAll(io.NewSectionReader(f, 0, maxLock))
	if err != nil {
		return lockRecord{}, time.Time{}
	}
	rec := parseLock(raw)
	st, err := f.Stat()
	if err != nil {
		return rec, time.Time{}
	}
	return rec, st.ModTime()
}

func parseLock(raw []byte) lockRecord {
	var rec lockRecord
	if json.Unmarshal(raw, &rec) == nil {
		rec.PID = max(rec.PID, 0) // a negative one would be a process group to kill(2)
		return rec
	}
	rec = lockRecord{}
	first, _, _ := strings.Cut(strings.TrimSpace(string(raw)), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(first))
	if err != nil || pid < 0 {
		return lockRecord{}
	}
	return lockRecord{PID: pid}
}

func alive(pid int) bool {
	err := syscall.Kill(pid, 0)
	return err == nil || errors.Is(err, syscall.EPERM)
}
