// The comparison of what was built with the plan, before anything of the agent runs.

package mounttree

import (
	"errors"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/pathfd"
)

// verify checks that every mount of the plan is attached where it belongs, shows the
// inode that was opened for it, that nothing else is attached, and that what must not
// be written is read-only, with all that is mounted below it.
func (b *builder) verify(plan *sandbox.Plan) error {
	attached, err := mountsBelow(b.at)
	if err != nil {
		return step("verify", "/proc/self/mountinfo", err)
	}
	planned := make(map[string]int, len(plan.Mounts))
	for i, m := range plan.Mounts {
		if m.Op != sandbox.OpBind && m.Op != sandbox.OpTmpfs && m.Op != sandbox.OpCover {
			continue
		}
		planned[m.Target] = i
		if _, ok := attached[m.Target]; !ok {
			return step("verify", m.Target, errElsewhere)
		}
		fd, err := pathfd.Beneath(b.tree, rel(m.Target), 0)
		if err != nil {
			return step("verify", m.Target, err)
		}
		id, err := identify(fd, m.Kind)
		unix.Close(fd)
		if err != nil {
			return step("verify", m.Target, err)
		}
		if id != b.ids[i] {
			return step("verify", m.Target, errElsewhere)
		}
	}
	if ro, ok := attached["/"]; !ok || !ro {
		return step("verify", "/", errors.New("the root of the view is not read-only"))
	}
	for target, ro := range attached {
		if target == "/" {
			continue
		}
		at := target
		i, ok := planned[at]
		for !ok && at != "/" {
			at = dirOf(at)
			i, ok = planned[at]
		}
		switch {
		case !ok:
			return step("verify", target, errElsewhere)
		case at != target && plan.Mounts[i].Op != sandbox.OpBind:
			return step("verify", target, errElsewhere)
		case plan.Mounts[i].Access != sandbox.ReadWrite && !ro:
			return step("verify", target, errors.New("it is not read-only"))
		}
	}
	return nil
}

func dirOf(p string) string {
	if i := strings.LastIndexByte(p, '/'); i > 0 {
		return p[:i]
	}
	return "/"
}

// mountsBelow reads which mounts hang on the topmost mount at the directory at, by
// their path below it, and whether each is read-only. What at held before is left out.
func mountsBelow(at string) (map[string]bool, error) {
	// Not through package os, which would have it watched for changes.
	fd, err := unix.Open("/proc/self/mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0) //nolint:forbidigo // the kernel's own
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	text := make([]byte, 0, 32<<10)
	for {
		text = slices.Grow(text, 4096)
		n, err := unix.Read(fd, text[len(text):cap(text)])
		switch {
		case err == unix.EINTR:
		case err != nil:
			return nil, err
		case n == 0:
			return parseMountinfo(string(text), at)
		default:
			text = text[:len(text)+n]
		}
	}
}

// parseMountinfo reads lines as proc_pid_mountinfo(5) has them: fields 1 and 2 are the
// mount's and its parent's ids, 5 and 6 the mount point and the mount's own options. A
// parent stands before what is mounted on it.
func parseMountinfo(text, at string) (map[string]bool, error) {
	out := map[string]bool{}
	ours := map[string]bool{}
	for line := range strings.Lines(text) {
		var f [6]string
		var ok bool
		rest := line
		for i := range f {
			if f[i], rest, ok = strings.Cut(rest, " "); !ok {
				return nil, errors.New("a line that is cut short")
			}
		}
		rest, ok = strings.CutPrefix(unescape(f[4]), at)
		switch {
		case ok && rest == "":
			clear(out)
			clear(ours)
			rest = "/"
		case !ok || rest[0] != '/' || !ours[f[1]]:
			continue
		}
		ours[f[0]] = true
		out[rest] = f[5] == "ro" || strings.HasPrefix(f[5], "ro,")
	}
	return out, nil
}

// unescape undoes the kernel's octal escapes of space, tab, newline and backslash.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			b.WriteByte((s[i+1]-'0')<<6 | (s[i+2]-'0')<<3 | (s[i+3] - '0'))
			i += 3
			continue
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
