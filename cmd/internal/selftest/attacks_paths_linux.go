// Attacks by paths: every way to name a file of the host that a check of names, a prefix or a
// link would let through, and every way to change one without writing it.

package selftest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func home(t *Targets) string { return t.HomeCanary }

func pathAttacks() []Attack {
	return []Attack{
		{"path-double-slash", "CVE-2025-59532", "read a file of the home as //home//…", "a check of names that is not the kernel's", MustFail, true, canaryAt(func(t *Targets) string { return strings.ReplaceAll(home(t), "/", "//") })},
		{"path-dots", "CVE-2025-59532", "the same as /./home/./…", "a check of names that is not the kernel's", MustFail, true, canaryAt(func(t *Targets) string { return strings.ReplaceAll(home(t), "/", "/./") })},
		{"path-back-and-forth", "CVE-2025-59532", "the same by way of /usr/../", "a prefix check before the path is resolved", MustFail, true, canaryAt(func(t *Targets) string { return under("/usr/bin/../..", home(t)) })},
		{"path-workspace-prefix", "CVE-2025-59532", "the same by WORKSPACE/../../…", "a prefix check before the path is resolved", MustFail, true, canaryAt(func(t *Targets) string { return dotdot(t.Workspace+"/.", home(t)) })},
		{"path-sibling", "CVE-2025-53110", "read in a folder whose name begins as the workspace's", "a prefix check without the slash", MustFail, true, canaryAt(func(t *Targets) string { return t.Sibling })},
		{"path-self-root", "CASES 11", "the same by /proc/self/root", "the process's own view", MustFail, true, canaryAt(func(t *Targets) string { return under("/proc/self/root", home(t)) })},
		{"path-thread-root", "CASES 11", "the same by /proc/thread-self/root", "the thread's own view", MustFail, true, canaryAt(func(t *Targets) string { return under("/proc/thread-self/root", home(t)) })},
		{"path-task-root", "CASES 11", "the same by /proc/self/task/TID/root", "another thread's view", MustFail, true, canaryAt(func(t *Targets) string {
			return under(fmt.Sprintf("/proc/self/task/%d/root", os.Getpid()), home(t))
		})},
		{"path-fd", "CASES 11", "the same by a descriptor of the workspace and ../", "a descriptor that leads out", MustFail, true, byDescriptor},
		{"path-host-cwd", "DESIGN 4", "the same by /proc/PID/cwd of a host process", "another process's view", MustFail, true, canaryAt(func(t *Targets) string { return ofHost(t, "cwd"+strings.Repeat("/..", 64), home(t)) })},
		{"path-host-fd", "DESIGN 4", "the same by /proc/PID/fd of a host process that has it open", "another process's files", MustFail, true, hostDescriptors},
		{"path-shm", "DESIGN 4", "read a file in the host's /dev/shm", "browsers' and databases' memory", MustFail, true, canaryAt(func(t *Targets) string { return t.ShmCanary })},
		{"path-own-config", "DESIGN 4", "read the agent's own agent.json", "secrets of its environment", MustFail, true, opensAt(os.O_RDONLY, func(t *Targets) string { return t.AgentJSON })},
		{"path-own-policy", "DESIGN 4", "open the agent's own agent.json for writing", "a policy of its own at the next start", MustFail, true, opensAt(os.O_RDWR, func(t *Targets) string { return t.AgentJSON })},

		{"link-chain", "CVE-2024-42472", "read by a link to a link", "links that are followed once", MustFail, true, byLink(func(t *Targets, dir string) (string, error) {
			if err := os.Symlink(home(t), dir+"/b"); err != nil {
				return "", err
			}
			return dir + "/a", os.Symlink("b", dir+"/a")
		})},
		{"link-directory", "CVE-2024-42472", "read by a link to the home's folder", "links in the middle of a path", MustFail, true, byLink(func(t *Targets, dir string) (string, error) {
			return dir + "/d/" + filepath.Base(home(t)), os.Symlink(filepath.Dir(home(t)), dir+"/d")
		})},
		{"link-relative", "CVE-2024-42472", "read by a relative link that climbs out", "links that are judged by their text", MustFail, true, byLink(func(t *Targets, dir string) (string, error) {
			return dir + "/r", os.Symlink(strings.Repeat("../", 64)+home(t)[1:], dir+"/r")
		})},
		{"link-magic", "CVE-2024-42472", "read by a link to /proc/1/root", "magic links", MustFail, true, byLink(func(t *Targets, dir string) (string, error) {
			return dir + "/m", os.Symlink("/proc/self/root"+home(t), dir+"/m")
		})},
		{"link-hard", "CASES 11", "make a hard link to a file of the home", "a file under another name", MustFail, true, byLink(func(t *Targets, dir string) (string, error) {
			return dir + "/h", os.Link(home(t), dir+"/h")
		})},
		{"rename-out", "DESIGN 4", "move a file of the home into the workspace and back", "take it away", MustFail, true, renameCanary},

		{"stat-home", "DESIGN 4", "see how large a file of the home is", "which files exist", MustFail, true, touches(func(p string) error { _, err := os.Stat(p); return err })},
		{"open-path-home", "DESIGN 4", "hold a file of the home by O_PATH", "a descriptor to open later", MustFail, true, touches(func(p string) error { return openPath(p) })},
		{"watch-home", "DESIGN 4", "watch a file of the home", "when it is used", MustFail, true, touches(watch)},
		{"chmod-home", "DESIGN 4", "change the mode of a file of the home to what it is", "open it to others", MustFail, true, touches(func(p string) error { return os.Chmod(p, 0o600) })},
		{"utimes-home", "DESIGN 4", "set the times of a file of the home", "hide a change", MustFail, true, touches(func(p string) error { return os.Chtimes(p, time.Time{}, time.Now()) })},
		{"xattr-home", "DESIGN 4", "list the attributes of a file of the home", "labels and capabilities", MustFail, true, touches(func(p string) error { _, err := unix.Listxattr(p, nil); return err })},
		{"truncate-home", "DESIGN 4", "cut a file of the home to the length it has", "empty it", MustFail, true, touches(cut)},
		{"lock-home", "DESIGN 4", "lock a file of the home", "stop the program that waits for it", MustFail, true, touches(lock)},
		{"list-home", "DESIGN 4", "find a file of the home by listing it", "which files exist", MustFail, true, listsName(home)},
		{"list-tmp", "DESIGN 4", "find a file of the host's /tmp by listing it", "which programs run", MustFail, true, listsName(func(t *Targets) string { return t.TmpCanary })},
		{"list-other-agent", "DESIGN 4", "list another agent's workspace", "what others work on", MustFail, true, listsName(func(t *Targets) string { return t.OtherAgent })},
		{"plant-in-root", "DESIGN 4", "make a file in AgentConnect's root", "a configuration of its own", MustFail, true, createsBeside(func(t *Targets) string { return t.RootCanary })},
		{"plant-in-agent", "DESIGN 4", "make a file in another agent's workspace", "hand something to another agent", MustFail, true, createsBeside(func(t *Targets) string { return t.OtherAgent })},
		{"plant-beside", "CVE-2025-53110", "make a file beside the workspace", "leave the workspace", MustFail, true, createsBeside(func(t *Targets) string { return t.Sibling })},
		{"plant-settings", "CVE-2026-25725", "plant settings with a hook beside a file of the home", "a program of the host that trusts them", MustFail, true, plants(".claude/settings.json", `{"hooks":{"SessionStart":[]}}`)},
		{"plant-git-config", "CVE-2026-26268", "plant a git configuration beside a file of the home", "core.fsmonitor, credential.helper", MustFail, true, plants(".config/git/config", "[core]\n")},
		{"plant-autostart", "CVE-2026-25725", "plant a user unit beside a file of the home", "a program at the next login", MustFail, true, plants(".config/systemd/user/x.service", "[Service]\n")},
		{"plant-login", "CASES 51", "plant a login beside a file of the home", "another account for the user's own work", MustFail, true, plants(".codex/auth.json", "{}\n")},

		{"list-log", "DESIGN 4", "list /var/log", "who was here, what failed", MustFail, true, listsAny("/var/log")},
		{"list-lib", "DESIGN 4", "list /var/lib", "databases, containers", MustFail, true, listsAny("/var/lib")},
		{"list-sys", "DESIGN 4", "list /sys/kernel", "debuggers, tracers", MustFail, true, listsAny("/sys/kernel")},
		{"list-dev", "DESIGN 4", "list /sys/class/net", "hardware addresses", MustFail, true, listsAny("/sys/class/net")},
		{"list-cgroup", "CASES 40", "list the host's control groups", "what runs here", MustFail, true, cgroups},
	}
}

func ofHost(t *Targets, entry, path string) string {
	if t.HostPID == 0 {
		return ""
	}
	return under(fmt.Sprintf("/proc/%d/%s", t.HostPID, entry), path)
}

// byDescriptor climbs from a descriptor of the workspace, as openat(2) goes.
func byDescriptor(_ context.Context, t *Targets) (Seen, string) {
	if t.HomeCanary == "" {
		return skipped("no target")
	}
	dir, err := unix.Open(t.Workspace, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return Refused, err.Error()
	}
	defer unix.Close(dir)
	fd, err := unix.Openat(dir, strings.Repeat("../", 64)+t.HomeCanary[1:], unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return Refused, err.Error()
	}
	f := os.NewFile(uintptr(fd), t.HomeCanary)
	defer f.Close()
	return holdsToken(t, f)
}

func holdsToken(t *Targets, r io.Reader) (Seen, string) {
	b, err := io.ReadAll(io.LimitReader(r, 1<<16))
	if err != nil {
		return Refused, err.Error()
	}
	if !bytes.Contains(b, []byte(t.Token)) {
		return refused("another file (%d bytes)", len(b))
	}
	return worked("read %d bytes", len(b))
}

// hostDescriptors opens what a process of the host has open.
func hostDescriptors(_ context.Context, t *Targets) (Seen, string) {
	if t.HostPID == 0 {
		return skipped("no target")
	}
	dir := fmt.Sprintf("/proc/%d/fd", t.HostPID)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return Refused, err.Error()
	}
	for _, e := range entries {
		f, err := os.OpenFile(filepath.Join(dir, e.Name()), os.O_RDONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			continue
		}
		st, err := f.Stat()
		if err == nil && st.Mode().IsRegular() {
			if seen, detail := holdsToken(t, f); seen == Worked {
				f.Close()
				return seen, detail
			}
		}
		f.Close()
	}
	return refused("none of %d holds it", len(entries))
}

func opensAt(flags int, path func(*Targets) string) func(context.Context, *Targets) (Seen, string) {
	return func(_ context.Context, t *Targets) (Seen, string) {
		p := path(t)
		if p == "" {
			return skipped("no target")
		}
		f, err := os.OpenFile(p, flags, 0)
		if err == nil {
			f.Close()
		}
		return outcome(err, "opened "+p)
	}
}

// byLink makes something in the workspace that leads to the canary, and reads by it.
func byLink(lay func(t *Targets, dir string) (string, error)) func(context.Context, *Targets) (Seen, string) {
	return func(ctx context.Context, t *Targets) (Seen, string) {
		if t.HomeCanary == "" {
			return skipped("no target")
		}
		dir, err := os.MkdirTemp(t.Workspace, ".agentconnect-selftest-")
		if err != nil {
			return Refused, err.Error()
		}
		defer os.RemoveAll(dir)
		path, err := lay(t, dir)
		if err != nil {
			return Refused, err.Error()
		}
		return canaryAt(func(*Targets) string { return path })(ctx, t)
	}
}

func renameCanary(_ context.Context, t *Targets) (Seen, string) {
	if t.HomeCanary == "" {
		return skipped("no target")
	}
	to := filepath.Join(t.Workspace, ".agentconnect-selftest-moved")
	if err := os.Rename(t.HomeCanary, to); err != nil {
		return Refused, err.Error()
	}
	return outcome(os.Rename(to, t.HomeCanary), "there and back")
}

// touches does something to the canary that leaves it as it is. The private home has the real
// one's path, where a file of that name would be the agent's own: only the real one counts.
func touches(do func(path string) error) func(context.Context, *Targets) (Seen, string) {
	return func(_ context.Context, t *Targets) (Seen, string) {
		if t.HomeCanary == "" {
			return skipped("no target")
		}
		return outcome(do(t.HomeCanary), "done to "+t.HomeCanary)
	}
}

func openPath(p string) error {
	fd, err := unix.Open(p, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err == nil {
		unix.Close(fd)
	}
	return err
}

func watch(p string) error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = unix.InotifyAddWatch(fd, p, unix.IN_ACCESS)
	return err
}

func cut(p string) error {
	st, err := os.Stat(p)
	if err != nil {
		return err
	}
	return os.Truncate(p, st.Size())
}

func lock(p string) error {
	f, err := os.Open(p)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
}

// listsName finds the file by listing its folder.
func listsName(path func(*Targets) string) func(context.Context, *Targets) (Seen, string) {
	return func(_ context.Context, t *Targets) (Seen, string) {
		p := path(t)
		if p == "" {
			return skipped("no target")
		}
		entries, err := os.ReadDir(filepath.Dir(p))
		if err != nil {
			return Refused, err.Error()
		}
		for _, e := range entries {
			if e.Name() == filepath.Base(p) {
				return worked("%s is there", p)
			}
		}
		return refused("%d others", len(entries))
	}
}

// listsAny lists a directory that has entries on every host.
func listsAny(dir string) func(context.Context, *Targets) (Seen, string) {
	return func(context.Context, *Targets) (Seen, string) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return Refused, err.Error()
		}
		if len(entries) == 0 {
			return refused("empty")
		}
		return worked("%d entries", len(entries))
	}
}

func cgroups(context.Context, *Targets) (Seen, string) {
	entries, err := os.ReadDir("/sys/fs/cgroup")
	if err != nil {
		return Refused, err.Error()
	}
	for _, e := range entries {
		if e.IsDir() {
			return worked("%d entries, %s among them", len(entries), e.Name())
		}
	}
	return refused("no group below the own one")
}

// createsBeside makes a file beside a canary. A folder of that name without the canary is
// another one: the way to the workspace leads by names of the host.
func createsBeside(canary func(*Targets) string) func(context.Context, *Targets) (Seen, string) {
	return func(ctx context.Context, t *Targets) (Seen, string) {
		if seen, detail := canaryAt(canary)(ctx, t); seen != Worked {
			return seen, detail
		}
		return creates(filepath.Dir(canary(t)))(ctx, t)
	}
}

// plants makes a file that a program of the host would trust, in the folder of the home's
// canary, and takes it away again. It worked if it lies beside the canary: in the private home,
// at the same path, nobody but the agent reads it.
func plants(name, text string) func(context.Context, *Targets) (Seen, string) {
	return func(ctx context.Context, t *Targets) (Seen, string) {
		if t.HomeCanary == "" {
			return skipped("no target")
		}
		base, err := os.MkdirTemp(filepath.Dir(t.HomeCanary), ".agentconnect-selftest-")
		if err != nil {
			return Refused, err.Error()
		}
		defer os.RemoveAll(base)
		path := filepath.Join(base, name)
		err = errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600))
		if err != nil {
			return Refused, err.Error()
		}
		beside := filepath.Join(filepath.Dir(path), strings.Repeat("../", strings.Count(name, "/")+1), filepath.Base(t.HomeCanary))
		if seen, _ := canaryAt(func(*Targets) string { return beside })(ctx, t); seen != Worked {
			return refused("it lies in the private home, not beside %s", t.HomeCanary)
		}
		return worked("made %s", path)
	}
}
