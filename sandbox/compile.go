// From policy to plan. Rules are gathered without order, the more specific path wins,
// and of two rules for one path the stricter one; then the mounts are laid out from
// the root down, and every directory between a writable mount and a mount below it is
// pinned, so that no rename inside carries a protected path away.

package sandbox

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Limits of the in-memory parts of the view, in bytes.
const (
	runSize = 64 << 20
)

// rule is one wish for one path inside.
type rule struct {
	target string
	source string // resolved host path; empty for covers and tmpfs
	access Access
	kind   Kind
	op     Op
	mode   uint32
	text   string // content of a file, text of a link
	// private marks a directory tree that belongs to the agent alone: mount points that
	// miss in it may be made.
	private bool
	grant   bool
	// channel marks the directory whose socket is there to be connected to.
	channel bool
	// keep mounts it also where the mount above shows it with the same access: the agent
	// cannot rename a mount point, so what the operator named stays what it was.
	keep bool
	// seal: see Seal. What was found a moment ago may have changed since.
	seal bool
	why  string
}

func strictness(a Access) int {
	switch a {
	case Hidden:
		return 2
	case ReadOnly:
		return 1
	default:
		return 0
	}
}

// compiler gathers the rules of one plan.
type compiler struct {
	p     Policy
	h     Host
	rules map[string]rule
	notes []string
}

// add puts a rule in; of two for the same path the stricter stays, and of two equally
// strict the one whose source sorts first, so that the order of rules never matters.
func (c *compiler) add(r rule) {
	old, ok := c.rules[r.target]
	if ok {
		a, b := strictness(old.access), strictness(r.access)
		if a > b || a == b && (old.op < r.op || old.op == r.op && old.source <= r.source) {
			return
		}
	}
	c.rules[r.target] = r
}

func (c *compiler) note(format string, args ...any) {
	c.notes = append(c.notes, fmt.Sprintf(format, args...))
}

// Compile turns a policy into the plan that the launcher carries out. It is a pure
// function of the policy and of what the host answers. An error is a *RefusedError or
// names the path that is wrong.
func Compile(p Policy, h Host) (*Plan, error) {
	c := &compiler{p: p, h: &seen{Host: h, resolved: map[string]resolved{}}, rules: map[string]rule{}}
	for _, step := range []func() error{c.check, c.system, c.etc, c.own, c.exposures, c.grants, c.run} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	if err := c.sockets(); err != nil {
		return nil, err
	}
	if err := c.seals(); err != nil {
		return nil, err
	}
	mounts, err := c.layout()
	if err != nil {
		return nil, err
	}
	if p.Nesting {
		for _, m := range mounts {
			if m.Pinned && !m.Create && !m.Sealed {
				c.note("nesting is on: in a namespace of its own the agent can move %s away and put another in its place; what lies in it is read-only for as long as it lies there", m.Target)
			}
		}
	}
	return &Plan{
		Agent: p.Agent, Mounts: mounts, Network: p.Network, Nesting: p.Nesting,
		DieWithParent: p.DieWithParent, OwnCgroup: p.OwnCgroup, Notes: c.notes,
	}, nil
}

// seen is a host that is asked once what a path leads to: one plan is of one moment, and
// the same few paths are compared with all the others. The launcher finds what changed since.
type seen struct {
	Host
	resolved map[string]resolved
}

type resolved struct {
	real string
	kind Kind
	err  error
}

func (s *seen) Resolve(path string) (string, Kind, error) {
	r, ok := s.resolved[path]
	if !ok {
		r.real, r.kind, r.err = s.Host.Resolve(path)
		s.resolved[path] = r
	}
	return r.real, r.kind, r.err
}

func (c *compiler) check() error {
	for name, path := range map[string]string{
		"home": c.p.Home, "root": c.p.Root, "agent directory": c.p.AgentDir, "private home": c.p.HomeDir,
		"private tmp": c.p.TmpDir, "memory": c.p.MemoryDir, "guest program": c.p.Guest,
	} {
		if name == "memory" && path == "" {
			continue // the agent has none
		}
		if !filepath.IsAbs(path) || filepath.Clean(path) != path || strings.ContainsRune(path, 0) {
			return fmt.Errorf("%s %q: not a clean absolute path", name, path)
		}
	}
	if c.p.Home == "/" {
		return &RefusedError{Path: "/", Reason: "the daemon's user has / as its home; give the user a home of its own"}
	}
	switch c.p.Network {
	case NetworkNone, NetworkAllowlist, NetworkOpen, NetworkHost:
	default:
		return fmt.Errorf("network mode %q: unknown; use none, allowlist, open or host", c.p.Network)
	}
	switch c.p.Read {
	case ReadSystem, ReadHost:
	default:
		return fmt.Errorf("read mode %q: unknown; use system or host", c.p.Read)
	}
	for _, f := range c.p.Files {
		below := strings.HasPrefix(f.Path, "/etc/") || inside(f.Path, c.p.Home) && f.Path != c.p.Home
		if filepath.Clean(f.Path) != f.Path || !below || strings.ContainsRune(f.Path, 0) {
			return fmt.Errorf("generated file %q: not a clean path below /etc or the home", f.Path)
		}
	}
	return nil
}

// system adds the trees that hold installed programs, and in read mode host the rest.
func (c *compiler) system() error {
	tops := slices.Clone(systemTrees)
	why := "installed programs"
	if c.p.Read == ReadHost {
		names, err := c.h.ReadDir("/")
		if err != nil {
			return fmt.Errorf("/: %w", err)
		}
		for _, n := range names {
			if !hostTops[n] && n != "etc" && !slices.Contains(tops, "/"+n) {
				tops = append(tops, "/"+n)
			}
		}
		tops = append(tops, "/sys")
		if len(c.p.Files) == 0 {
			tops = append(tops, "/etc")
		} else if err := c.entries("/etc", why); err != nil {
			return err
		}
	}
	for _, path := range tops {
		c.expose(path, why)
	}
	if c.p.Read != ReadHost {
		c.expose("/sys/devices/system/cpu", "processor topology")
		return nil
	}
	for _, o := range c.p.OtherHomes {
		real, kind, err := c.h.Resolve(o)
		if err != nil || kind != KindDir {
			continue
		}
		for _, at := range dedup(o, real) {
			if at != "/" && !inside(c.p.Home, at) && !inside("/usr", at) && !inside("/var", at) {
				c.add(rule{target: at, op: OpCover, access: Hidden, kind: KindDir, why: "another user's home"})
			}
		}
	}
	return nil
}

// expose adds a host path read-only at the same path; a link stays a link where its
// target is part of the view anyway.
func (c *compiler) expose(path, why string) {
	if text, err := c.h.Readlink(path); err == nil && path != "/etc" {
		to := text
		if !filepath.IsAbs(to) {
			to = filepath.Join(filepath.Dir(path), to)
		}
		if inside(to, "/usr") {
			c.add(rule{target: path, op: OpLink, access: ReadOnly, text: text, why: why})
			return
		}
	}
	real, kind, err := c.h.Resolve(path)
	if err != nil || kind != KindDir && kind != KindFile {
		return // what the host does not have is not part of the view
	}
	if c.forbidden(real) {
		c.note("%s leads to %s, which must stay hidden; it is left out", path, real)
		return
	}
	c.add(rule{target: path, source: real, op: OpBind, access: ReadOnly, kind: kind, why: why})
}

// entries adds what lies in a directory of the host entry by entry, for one in which files
// of ours have a place: nothing can be made in a directory that is bound as a whole.
func (c *compiler) entries(dir, why string) error {
	names, err := c.h.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	for _, n := range names {
		path := filepath.Join(dir, n)
		if text, err := c.h.Readlink(path); err == nil {
			c.add(rule{target: path, op: OpLink, access: ReadOnly, text: text, why: why})
			continue
		}
		switch {
		case slices.ContainsFunc(c.p.Files, func(f File) bool { return f.Path == path }):
		case slices.ContainsFunc(c.p.Files, func(f File) bool { return inside(f.Path, path) }):
			if err := c.entries(path, why); err != nil {
				return err
			}
		default:
			c.expose(path, why)
		}
	}
	return nil
}

// forbidden reports whether a resolved path holds or lies in what must stay hidden,
// for sources that no operator wrote.
func (c *compiler) forbidden(real string) bool {
	for _, hidden := range []string{c.p.Root, c.p.Home, realOr(c.h, c.p.Root), realOr(c.h, c.p.Home)} {
		if inside(real, hidden) || real == "/" {
			return true
		}
	}
	for _, hidden := range []string{"/run", "/tmp", "/var/tmp", "/root", "/proc", "/dev"} {
		if inside(real, hidden) {
			return true
		}
	}
	return false
}

// etc adds the reviewed entries of /etc and the generated files.
func (c *compiler) etc() error {
	if c.p.Read == ReadSystem {
		for _, name := range etcEntries {
			path := "/etc/" + name
			if text, err := c.h.Readlink(path); err == nil {
				to := text
				if !filepath.IsAbs(to) {
					to = filepath.Join("/etc", text)
				}
				if inside(to, "/usr") {
					c.add(rule{target: path, op: OpLink, access: ReadOnly, text: text, why: "reviewed entry of /etc"})
					continue
				}
			}
			c.expose(path, "reviewed entry of /etc")
		}
	}
	passwd, err := c.h.ReadFile("/etc/passwd")
	if err == nil && !hasPasswdEntry(passwd, c.p.UID) {
		// Users from a directory service: programs that ask getpwuid must agree with $HOME.
		if passwd != "" && !strings.HasSuffix(passwd, "\n") {
			passwd += "\n"
		}
		passwd += fmt.Sprintf("%s:x:%d:%d::%s:/bin/sh\n", c.p.User, c.p.UID, c.p.GID, c.p.Home)
		c.generated("/etc/passwd", passwd, "the host's users and the daemon's user")
	}
	hostname, _ := c.h.ReadFile("/etc/hostname")
	hostname = strings.TrimSpace(hostname)
	hosts := "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
	if hostname != "" && !strings.ContainsAny(hostname, " \t\n#") {
		hosts += "127.0.1.1 " + hostname + "\n"
	}
	resolv := "# generated: this agent has no network\n"
	if c.p.Network.Gated() {
		text, err := c.h.ReadFile("/etc/resolv.conf")
		if err != nil {
			text = "" // our own server needs nothing of it
		}
		resolv = "# generated: every address is a name server here, and all are the same one\nnameserver " + GatewayIPv4 + "\n" + search(text)
	}
	if c.p.Network == NetworkHost {
		if text, err := c.h.ReadFile("/etc/hosts"); err == nil {
			hosts = text
		}
		text, err := c.h.ReadFile("/etc/resolv.conf")
		if err != nil {
			c.note("/etc/resolv.conf cannot be read (%v): names will not resolve inside; repair it on the host and restart the agent", err)
			text = "# generated: the host's resolv.conf cannot be read\n"
		}
		resolv = text
	}
	c.generated("/etc/hosts", hosts, "generated")
	c.generated("/etc/resolv.conf", resolv, "generated")
	for _, f := range c.p.Files {
		if inside(f.Path, c.p.Home) {
			for _, home := range dedup(c.p.Home, realOr(c.h, c.p.Home)) {
				c.add(rule{target: home + strings.TrimPrefix(f.Path, c.p.Home), op: OpCover, access: ReadOnly, kind: KindFile, text: f.Content, why: f.Why})
			}
			continue
		}
		c.add(rule{target: f.Path, op: OpFile, access: ReadOnly, text: f.Content, mode: 0o444, why: f.Why})
	}
	return nil
}

// search gives the line of a resolv.conf that says where short names are looked for: the
// last one counts.
func search(resolv string) string {
	line := ""
	for l := range strings.Lines(resolv) {
		f := strings.Fields(l)
		if len(f) > 1 && (f[0] == "search" || f[0] == "domain") {
			line = "search " + strings.Join(f[1:], " ") + "\n"
		}
	}
	return line
}

// generated adds a file with our content, also where the host has a link.
func (c *compiler) generated(path, text, why string) {
	delete(c.rules, path)
	if c.p.Read == ReadSystem || len(c.p.Files) > 0 {
		c.add(rule{target: path, op: OpFile, access: ReadOnly, text: text, mode: 0o444, why: why})
		return
	}
	// The whole /etc is bound: cover what the path leads to. A link into /run leads
	// into our own tmpfs there, also when it dangles on the host.
	at := path
	for range 8 {
		to, err := c.h.Readlink(at)
		if err != nil {
			break
		}
		if !filepath.IsAbs(to) {
			to = filepath.Join(filepath.Dir(at), to)
		}
		at = filepath.Clean(to)
	}
	if inside(at, "/run") {
		c.add(rule{target: at, op: OpFile, access: ReadOnly, text: text, mode: 0o444, why: why})
		return
	}
	if real, kind, err := c.h.Resolve(at); err == nil && kind == KindFile {
		c.add(rule{target: real, op: OpCover, access: ReadOnly, kind: KindFile, text: text, why: why})
		return
	}
	c.note("%s is missing or no regular file on the host; it is left as it is", path)
}

func hasPasswdEntry(passwd string, uid int) bool {
	for line := range strings.Lines(passwd) {
		if f := strings.Split(line, ":"); len(f) >= 6 && f[2] == strconv.Itoa(uid) {
			return true
		}
	}
	return false
}

// own adds what belongs to the agent: home, tmp, memory, workspace.
func (c *compiler) own() error {
	home, err := ownDir(c.p, c.p.HomeDir, c.h)
	if err != nil {
		return err
	}
	tmp, err := ownDir(c.p, c.p.TmpDir, c.h)
	if err != nil {
		return err
	}
	ws, err := CheckWorkspace(c.p, c.h)
	if err != nil {
		return err
	}
	for _, at := range dedup(c.p.Home, realOr(c.h, c.p.Home)) {
		c.add(rule{target: at, source: home, op: OpBind, access: ReadWrite, kind: KindDir, private: true, why: "private home"})
	}
	c.add(rule{target: "/tmp", source: tmp, op: OpBind, access: ReadWrite, kind: KindDir, private: true, why: "private tmp"})
	c.add(rule{target: "/var/tmp", source: tmp, op: OpBind, access: ReadWrite, kind: KindDir, private: true, why: "private tmp"})
	if c.p.MemoryDir != "" {
		memory, err := ownDir(c.p, c.p.MemoryDir, c.h)
		if err != nil {
			return err
		}
		c.place(c.p.MemoryDir, memory, rule{access: ReadWrite, kind: KindDir, why: "memory"})
	}
	lexical := c.p.Workspace
	if !filepath.IsAbs(lexical) {
		lexical = filepath.Join(c.p.AgentDir, lexical)
	}
	c.place(filepath.Clean(lexical), ws, rule{access: ReadWrite, kind: KindDir, keep: true, why: "workspace"})
	// ROOT may lie outside the home, in a tree that is exposed: nothing of it shows but what
	// place put there.
	for _, at := range dedup(c.p.Root, realOr(c.h, c.p.Root)) {
		if !inside(at, c.p.Home) && !inside(at, realOr(c.h, c.p.Home)) {
			c.add(rule{target: at, op: OpTmpfs, access: Hidden, kind: KindDir, mode: 0o755, why: "AgentConnect's own directory"})
		}
	}
	return nil
}

// place adds a host path at the path it was named by and at the one it resolves to, so
// that an editor's paths and getcwd agree.
func (c *compiler) place(lexical, real string, r rule) {
	if home := realOr(c.h, c.p.Home); lexical == real && home != c.p.Home && inside(real, home) {
		lexical = filepath.Join(c.p.Home, strings.TrimPrefix(real, home))
	}
	for _, at := range dedup(lexical, real) {
		r.target, r.source, r.op = at, real, OpBind
		c.add(r)
	}
}

func (c *compiler) exposures() error {
	for _, path := range append(slices.Clone(c.p.Expose), c.p.Guest) {
		real, kind, err := c.h.Resolve(path)
		if err != nil {
			return fmt.Errorf("%s: %w; the runtime's installation changed, start the agent again", path, err)
		}
		at, why := path, "the runtime's installation"
		if path == c.p.Guest {
			at, why = GuestPath, "our helper inside the boundary"
		} else if c.visible(real) && real == path {
			continue
		}
		home, root := realOr(c.h, c.p.Home), realOr(c.h, c.p.Root)
		switch {
		case real == "/" || inside(home, real):
			return &RefusedError{Path: path, Real: real, Reason: "a runtime's installation cannot be the home or hold it"}
		case inside(root, real) || inside(real, root) && !inside(real, filepath.Join(root, "runtimes")) && path != c.p.Guest:
			return &RefusedError{Path: path, Real: real, Reason: "a runtime cannot lie in " + c.p.Root}
		}
		for _, k := range homeKeys[:2] {
			if key := filepath.Join(home, k.path); inside(real, key) || inside(key, real) && path != c.p.Guest {
				return &RefusedError{Path: path, Real: real, Reason: k.reason}
			}
		}
		if at == GuestPath {
			c.add(rule{target: at, source: real, op: OpBind, access: ReadOnly, kind: kind, why: why})
			continue
		}
		c.place(at, real, rule{access: ReadOnly, kind: kind, why: why})
	}
	return nil
}

// visible reports whether a path is part of the system's trees.
func (c *compiler) visible(real string) bool {
	return slices.ContainsFunc(systemTrees, func(t string) bool {
		r, ok := c.rules[t]
		return ok && r.op == OpBind && inside(real, t)
	})
}

func (c *compiler) grants() error {
	for _, g := range c.p.Grants {
		if g.Access != ReadOnly && g.Access != ReadWrite {
			return fmt.Errorf("grant %s: access %q is neither ro nor rw", g.Path, g.Access)
		}
		if err := CheckGrant(c.p, g.Path, g.Access, c.h); err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				// Nothing is made on the host, and no mount point is left behind.
				c.note("grant %s: the path does not exist, so it is not part of the view; make it and restart the agent", g.Path)
				continue
			}
			return fmt.Errorf("grant: %w", err)
		}
		real, kind, err := c.h.Resolve(filepath.Clean(g.Path))
		if err != nil {
			return fmt.Errorf("grant %s: %w", g.Path, err)
		}
		c.place(filepath.Clean(g.Path), real, rule{access: g.Access, kind: kind, grant: true, keep: true, why: "grant " + g.Path + ":" + string(g.Access)})
	}
	return nil
}

// run adds the fresh /run and the links that lead to it.
func (c *compiler) run() error {
	c.add(rule{target: "/run", op: OpTmpfs, access: ReadWrite, kind: KindDir, mode: 0o755, why: "a fresh /run"})
	uid := strconv.Itoa(c.p.UID)
	for _, d := range []struct {
		path string
		mode uint32
	}{{"/run/user", 0o755}, {"/run/user/" + uid, 0o700}, {"/run/agentconnect", 0o755}, {"/run/lock", 0o1777}, {"/proc", 0o555}, {"/dev", 0o755}} {
		c.add(rule{target: d.path, op: OpDir, access: ReadWrite, kind: KindDir, mode: d.mode, why: "a fresh " + d.path})
	}
	if c.p.OwnCgroup {
		c.add(rule{target: CgroupPath, op: OpDir, access: ReadOnly, kind: KindDir, mode: 0o555, why: "where the agent's control group is shown"})
	}
	for _, d := range []struct {
		source, target, why string
		channel             bool
	}{
		{c.p.ChannelDir, ChannelPath, "the socket of our helper inside", true},
		{c.p.SecretsDir, SecretsPath, "the agent's secrets", false},
	} {
		if d.source == "" {
			continue
		}
		if !filepath.IsAbs(d.source) || filepath.Clean(d.source) != d.source {
			return fmt.Errorf("%s %q: not a clean absolute path", d.target, d.source)
		}
		// The supervisor makes the directory when it starts the agent; explain may come before.
		c.add(rule{target: d.target, source: realOr(c.h, d.source), op: OpBind, access: ReadOnly, kind: KindDir, channel: d.channel, why: d.why})
	}
	if err := c.repository(); err != nil {
		return err
	}
	if c.p.Read == ReadSystem {
		c.add(rule{target: "/var/run", op: OpLink, access: ReadOnly, text: "/run", why: "a fresh /run"})
		c.add(rule{target: "/var/lock", op: OpLink, access: ReadOnly, text: "/run/lock", why: "a fresh /run"})
	}
	return nil
}

// repository shows the repository of an agent's own clone.
func (c *compiler) repository() error {
	if c.p.Repository == "" {
		if c.p.Receive {
			return errors.New("nothing to receive into: no repository is named")
		}
		return nil
	}
	if !filepath.IsAbs(c.p.Repository) || filepath.Clean(c.p.Repository) != c.p.Repository {
		return fmt.Errorf("repository %q: not a clean absolute path", c.p.Repository)
	}
	real := realOr(c.h, c.p.Repository)
	c.add(rule{target: RepositoryPath, source: real, op: OpBind, access: ReadOnly, kind: KindDir, why: "the repository that the agent's clone pushes to"})
	if !c.p.Receive {
		return nil
	}
	for _, part := range []string{"objects", "refs"} {
		c.add(rule{target: RepositoryPath + "/" + part, source: real + "/" + part, op: OpBind, access: ReadWrite, kind: KindDir, why: "what is pushed"})
	}
	// alternates would have git read another repository's objects.
	c.add(rule{target: RepositoryPath + "/objects/info", source: real + "/objects/info", op: OpBind, access: ReadOnly, kind: KindDir, why: "where git looks for further objects"})
	return nil
}

// maxCovers bounds the sockets that are covered: each costs a mount, and an agent could
// make thousands in a folder that it shares.
const maxCovers = 256

// sockets covers the host's Unix sockets in what is exposed: a socket can be connected
// to through a read-only mount.
func (c *compiler) sockets() error {
	sorted := c.sorted()
	var folders []string
	for _, r := range sorted {
		if r.op == OpBind && r.keep && r.kind == KindDir {
			folders = append(folders, r.source)
		}
	}
	paths, odd, err := c.h.Sockets(folders)
	if err != nil {
		return fmt.Errorf("the host's sockets cannot be listed: %w; the agent is not started, since it could connect to one in a folder that it sees", err)
	}
	// The kernel tells the names that sockets were bound by; moved, linked, or bound by a
	// relative name or in another network namespace, they are found by looking.
	shut := map[string]bool{} // folders that an agent could have shut over one, and open again
	for _, r := range sorted {
		if r.op == OpBind && r.keep && r.kind == KindDir {
			found, closed, all := c.h.SocketsBelow(r.source, odd)
			for _, dir := range closed {
				shut[dir] = true
				paths = append(paths, dir)
			}
			for _, path := range found {
				if real, kind, err := c.h.Resolve(path); err == nil && kind == KindSocket {
					paths = append(paths, real)
				}
			}
			if !all {
				c.note("%s is too large to look for every socket in it: an agent can connect to one that is moved or linked there", r.source)
			}
		}
	}
	slices.Sort(paths)
	covers := 0
	for _, real := range slices.Compact(paths) {
		if !filepath.IsAbs(real) || filepath.Clean(real) != real {
			continue // out of reach from our root
		}
		for _, r := range sorted {
			if r.op != OpBind || r.source == "" || r.private || r.channel || !inside(real, r.source) {
				continue
			}
			at := filepath.Join(r.target, strings.TrimPrefix(real, r.source))
			if owner := ownerOf(sorted, at); owner.target == r.target {
				if covers++; covers > maxCovers {
					return fmt.Errorf("more than %d sockets, and folders that may not be looked at, lie in the folders that the agent sees, such as %s; remove those that nobody needs (a folder can be opened with chmod u+rwx), or take the folder away from the agent", maxCovers, real)
				}
				n := rule{target: at, op: OpCover, access: Hidden, kind: KindFile, why: "a socket of the host"}
				if shut[real] {
					n.kind, n.why = KindDir, "a folder that may not be looked at: a socket of the host could lie in it"
				}
				c.add(n)
			}
		}
	}
	return nil
}

func (c *compiler) sorted() []rule {
	out := make([]rule, 0, len(c.rules))
	for _, r := range c.rules {
		out = append(out, r)
	}
	slices.SortFunc(out, func(a, b rule) int { return comparePaths(a.target, b.target) })
	return out
}

// ownerOf finds the most specific mount that holds path.
func ownerOf(sorted []rule, path string) rule {
	var best rule
	for _, r := range sorted {
		if (r.op == OpBind || r.op == OpTmpfs || r.op == OpCover) && inside(path, r.target) && len(r.target) >= len(best.target) {
			best = r
		}
	}
	return best
}

// comparePaths orders paths so that a directory comes before what lies in it.
func comparePaths(a, b string) int {
	for i := range min(len(a), len(b)) {
		switch x, y := a[i], b[i]; {
		case x == y:
		case x == '/': // before every other byte that can follow a common prefix
			return -1
		case y == '/':
			return 1
		default:
			return cmp.Compare(x, y)
		}
	}
	return cmp.Compare(len(a), len(b))
}

// layout orders the rules into mounts, drops what changes nothing, and adds pins.
func (c *compiler) layout() ([]Mount, error) {
	sorted := c.sorted()
	var out []Mount
	var stack []rule // the mounts that hold the current path, outermost first
	pinned := map[string]bool{}
	link := "" // the last link made; what lies behind it has a rule at its resolved place
	for i, r := range sorted {
		if r.op == OpCover && r.kind == KindDir && i+1 < len(sorted) && inside(sorted[i+1].target, r.target) {
			// Something more specific is shown in it, and needs a mount point there.
			r.op, r.mode = OpTmpfs, 0o755
		}
		if link != "" && r.target != link && inside(r.target, link) {
			continue
		}
		if r.op == OpLink {
			link = r.target
		}
		for len(stack) > 0 && !inside(r.target, stack[len(stack)-1].target) {
			stack = stack[:len(stack)-1]
		}
		create := true
		if len(stack) > 0 {
			above := stack[len(stack)-1]
			create = above.private || above.op == OpTmpfs
			switch {
			case above.kind != KindDir && (above.seal || r.seal):
				return nil, &ChangedError{Path: r.target, Err: errors.New(above.target + " was a file and a folder")}
			case above.kind != KindDir:
				return nil, fmt.Errorf("%s lies in %s, which is a file", r.target, above.target)
			case r.op == OpBind && above.op == OpBind && above.access == r.access && !above.private && !r.keep &&
				filepath.Join(above.source, strings.TrimPrefix(r.target, above.target)) == r.source:
				continue // the mount above shows it already, with the same access
			}
			if above.op == OpBind && !create {
				// The mount point must exist on the host, without a link on the way.
				host := filepath.Join(above.source, strings.TrimPrefix(r.target, above.target))
				real, _, err := c.h.Resolve(host)
				switch {
				case r.seal: // a link may stand there, also one that leads nowhere, which the mount goes over
					if _, lerr := c.h.Readlink(host); err != nil && lerr != nil {
						return nil, &ChangedError{Path: host, Err: err}
					}
				case err != nil && r.op == OpDir:
					continue
				case errors.Is(err, fs.ErrNotExist) && r.op == OpCover:
					continue // what was to be covered is gone
				case err != nil && r.op == OpCover:
					return nil, &ChangedError{Path: host, Err: err}
				case err != nil && (r.op == OpLink || r.op == OpFile):
					continue
				case err != nil:
					return nil, fmt.Errorf("%s: it lies in %s, where nothing can be made: %w", r.target, above.target, err)
				case real != host && (r.op == OpBind || r.op == OpCover):
					continue // a link on the host leads to the resolved place, which has a rule of its own
				case r.op == OpDir || r.op == OpLink || r.op == OpFile:
					continue
				}
			}
			if above.op == OpBind && above.access == ReadWrite && r.op != OpDir && r.op != OpLink {
				for _, dir := range between(above.target, r.target) {
					if pinned[dir] {
						continue
					}
					pinned[dir] = true
					out = append(out, Mount{
						Op: OpBind, Target: dir, Source: filepath.Join(above.source, strings.TrimPrefix(dir, above.target)),
						Access: ReadWrite, Kind: KindDir, Create: create, Pinned: true, Sealed: r.seal, Why: "pinned: " + r.target + " lies in it",
					})
				}
			}
		}
		m := Mount{Op: r.op, Target: r.target, Source: r.source, Access: r.access, Kind: r.kind, Create: create, Grant: r.grant, Sealed: r.seal, Mode: r.mode, Why: r.why}
		switch r.op {
		case OpLink:
			m.Source, m.Kind = r.text, ""
		case OpFile, OpCover:
			m.Content = r.text
		case OpTmpfs:
			m.Size = runSize
		case OpBind, OpDir:
		}
		out = append(out, m)
		if m.mounts() {
			stack = append(stack, r)
		}
	}
	return out, nil
}

// between lists the directories strictly between two paths, outermost first.
func between(above, below string) []string {
	var out []string
	for dir := filepath.Dir(below); dir != above && inside(dir, above); dir = filepath.Dir(dir) {
		out = append(out, dir)
	}
	slices.Reverse(out)
	return out
}
