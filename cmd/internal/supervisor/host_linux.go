package supervisor

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/coredump"
)

// scopesAbstractSockets reports whether the kernel keeps a sandbox off the host's
// abstract sockets (Landlock ABI 6).
func scopesAbstractSockets() bool {
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	return errno == 0 && abi >= 6
}

// Harden prepares this process: no core dump may carry the spec's secrets to disk, and
// what an agent without a boundary leaves behind becomes our child.
func Harden() error {
	if err := coredump.Off(); err != nil {
		return err
	}
	return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
}

// endOrphans ends what an agent without a boundary, or a program of the operator's beside
// it, left behind: processes that left its group and session came to us as the nearest
// subreaper. A sandbox leaves none.
func (s *Supervisor) endOrphans() {
	if s.spec.Sandboxed && !s.outside.Load() {
		return
	}
	for range 100 { // each round ends a generation
		kids := ownChildren()
		if len(kids) == 0 {
			return
		}
		for _, pid := range kids {
			_ = unix.Kill(pid, unix.SIGKILL) // our own unreaped child: the number is its alone
			var ws unix.WaitStatus
			for {
				if _, err := unix.Wait4(pid, &ws, 0, nil); err != unix.EINTR {
					break
				}
			}
		}
	}
}

// ownChildren lists the children of this process.
func ownChildren() []int {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return nil
	}
	var out []int
	for _, t := range tasks {
		b, err := os.ReadFile("/proc/self/task/" + t.Name() + "/children")
		if err != nil {
			continue
		}
		for f := range strings.FieldsSeq(string(b)) {
			if pid, err := strconv.Atoi(f); err == nil {
				out = append(out, pid)
			}
		}
	}
	return out
}
