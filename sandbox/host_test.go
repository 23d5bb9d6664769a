package sandbox

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
)

// memHost is a host in memory: a tree of directories, files, links and sockets.
type memHost struct {
	nodes   map[string]memNode
	sockets []string
}

type memNode struct {
	kind Kind
	text string // of a file, or where a link leads
	link bool
}

func newMemHost() *memHost { return &memHost{nodes: map[string]memNode{"/": {kind: KindDir}}} }

func (h *memHost) put(path string, n memNode) *memHost {
	for dir := filepath.Dir(path); dir != "/"; dir = filepath.Dir(dir) {
		if _, ok := h.nodes[dir]; !ok {
			h.nodes[dir] = memNode{kind: KindDir}
		}
	}
	h.nodes[path] = n
	return h
}

func (h *memHost) dir(paths ...string) *memHost {
	for _, p := range paths {
		h.put(p, memNode{kind: KindDir})
	}
	return h
}

func (h *memHost) file(path, text string) *memHost {
	return h.put(path, memNode{kind: KindFile, text: text})
}
func (h *memHost) link(path, to string) *memHost {
	return h.put(path, memNode{link: true, text: to})
}
func (h *memHost) socket(path string) *memHost {
	h.sockets = append(h.sockets, path)
	return h.put(path, memNode{kind: KindSocket})
}

func (h *memHost) Resolve(path string) (string, Kind, error) {
	at := "/"
	rest := strings.Split(strings.Trim(path, "/"), "/")
	for hops := 0; len(rest) > 0; {
		name := rest[0]
		rest = rest[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			at = filepath.Dir(at)
			continue
		}
		next := filepath.Join(at, name)
		n, ok := h.nodes[next]
		if !ok {
			return "", "", &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist}
		}
		if n.link {
			if hops++; hops > 40 {
				return "", "", fmt.Errorf("%s: too many links", path)
			}
			if filepath.IsAbs(n.text) {
				at = "/"
			}
			rest = append(strings.Split(strings.Trim(n.text, "/"), "/"), rest...)
			continue
		}
		at = next
	}
	return at, h.nodes[at].kind, nil
}

func (h *memHost) Readlink(path string) (string, error) {
	dir, _, err := h.Resolve(filepath.Dir(path))
	if err != nil {
		return "", err
	}
	n, ok := h.nodes[filepath.Join(dir, filepath.Base(path))]
	if !ok || !n.link {
		return "", &fs.PathError{Op: "readlink", Path: path, Err: fs.ErrInvalid}
	}
	return n.text, nil
}

func (h *memHost) ReadDir(path string) ([]string, error) {
	var out []string
	for p := range h.nodes {
		if p != "/" && filepath.Dir(p) == path {
			out = append(out, filepath.Base(p))
		}
	}
	slices.Sort(out)
	return out, nil
}

func (h *memHost) ReadFile(path string) (string, error) {
	real, kind, err := h.Resolve(path)
	if err != nil {
		return "", err
	}
	if kind != KindFile {
		return "", &fs.PathError{Op: "read", Path: path, Err: fs.ErrInvalid}
	}
	return h.nodes[real].text, nil
}

func (h *memHost) Sockets([]string) ([]string, bool, error) { return h.sockets, false, nil }

func (h *memHost) SocketsBelow(string, bool) ([]string, []string, bool) { return nil, nil, true }

// debian is a small Debian machine with a user alice who has an agent a1.
func debian() *memHost {
	h := newMemHost()
	h.dir("/usr/bin", "/usr/lib", "/usr/local/bin", "/opt", "/var/tmp", "/var/lib", "/tmp", "/run/user/1000", "/root", "/srv", "/etc/ssl", "/etc/alternatives", "/sys/devices/system/cpu", "/home/bob", "/dev", "/proc", "/boot")
	h.link("/bin", "usr/bin").link("/lib", "usr/lib").link("/sbin", "usr/sbin")
	h.file("/etc/passwd", "root:x:0:0:root:/root:/bin/bash\nalice:x:1000:1000::/home/alice:/bin/bash\n").file("/etc/group", "").file("/etc/nsswitch.conf", "hosts: files dns\n")
	h.file("/etc/hosts", "127.0.0.1 localhost\n10.1.1.1 intranet\n").file("/etc/hostname", "box\n").file("/etc/shadow", "secret")
	h.link("/etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf").file("/run/systemd/resolve/stub-resolv.conf", "nameserver 127.0.0.53\n")
	h.link("/etc/localtime", "/usr/share/zoneinfo/UTC").link("/etc/os-release", "../usr/lib/os-release").file("/usr/lib/os-release", "")
	h.file("/usr/libexec/agentconnect-sandbox/agentconnect-guest", "")
	h.dir("/home/alice/src/app/.git/hooks", "/home/alice/src/lib", "/home/alice/.ssh", "/home/alice/.config/systemd/user", "/home/alice/.cache/pip", "/home/alice/.local/share/tool", "/home/alice/.local/bin")
	h.file("/home/alice/.bashrc", "")
	for _, id := range []string{"a1", "a2"} {
		for _, d := range []string{"home", "tmp", "memory", "workspace"} {
			h.dir("/home/alice/.agentconnect/agents/" + id + "/" + d)
		}
		h.file("/home/alice/.agentconnect/agents/"+id+"/agent.json", "{}")
	}
	return h
}

func alice() Policy {
	dir := "/home/alice/.agentconnect/agents/a1"
	return Policy{
		Agent: "a1", UID: 1000, GID: 1000, User: "alice", Home: "/home/alice", OtherHomes: []string{"/root", "/home/bob"},
		Root: "/home/alice/.agentconnect", AgentDir: dir, HomeDir: dir + "/home", TmpDir: dir + "/tmp", MemoryDir: dir + "/memory",
		Workspace: "workspace", Read: ReadSystem, Guest: "/usr/libexec/agentconnect-sandbox/agentconnect-guest", Network: NetworkNone,
	}
}
