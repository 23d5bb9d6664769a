// Package peers is what every measurement needs of the programs that ours are measured beside:
// bubblewrap's arguments for the same mounts, and what a process holds in memory.
package peers

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"agentconnect.md/sandbox/sandbox"
)

// Bwrap asks bubblewrap to make the plan's mounts itself.
func Bwrap(plan *sandbox.Plan) []string {
	var args []string
	for _, m := range plan.Mounts {
		switch m.Op {
		case sandbox.OpBind:
			if strings.HasPrefix(m.Source, "/run/user/") {
				args = append(args, "--tmpfs", m.Target) // a supervisor's, gone with it
				continue
			}
			flag := "--ro-bind"
			if m.Access == sandbox.ReadWrite {
				flag = "--bind"
			}
			args = append(args, flag, m.Source, m.Target)
		case sandbox.OpTmpfs, sandbox.OpCover:
			args = append(args, "--tmpfs", m.Target)
		case sandbox.OpLink:
			args = append(args, "--symlink", m.Source, m.Target)
		case sandbox.OpDir:
			args = append(args, "--dir", m.Target)
		case sandbox.OpFile:
			args = append(args, "--dir", filepath.Dir(m.Target))
		}
	}
	return append(args, "--proc", "/proc", "--dev", "/dev", "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL")
}

// PSS reads a process's proportional set size, in MB (10^6 bytes), as proc_pid_smaps(5) has it.
func PSS(pid int) (float64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		var kb float64
		if n, _ := fmt.Sscanf(line, "Pss: %f kB", &kb); n == 1 {
			return kb * 1024 / 1e6, nil
		}
	}
	return 0, errors.New("no Pss in smaps_rollup")
}
