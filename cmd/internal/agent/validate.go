// What the fields of an agent may hold. The rules here are the same for everybody;
// what a machine's policy forbids on top is for package config.

package agent

import (
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/gitclone"
	"agentconnect.md/sandbox/cmd/internal/gitcred"
	"agentconnect.md/sandbox/cmd/internal/lazyregexp"
	"agentconnect.md/sandbox/cmd/internal/mcp"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/gitseal"
)

// An id names a directory, systemd units and a command-line argument. No dot:
// agent@x.service would mean something else.
var idRule = lazyregexp.New(`^[a-z0-9][a-z0-9_-]{0,62}$`)

var (
	envRule     = lazyregexp.New(`^[A-Za-z_][A-Za-z0-9_]*$`)
	runtimeRule = lazyregexp.New(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)
	sizeRule    = lazyregexp.New(`^([0-9]{1,19})(?:\.([0-9]{1,9}))?([KMGT]?)$`)
	cpuRule     = lazyregexp.New(`^([0-9]{1,7})%$`)
)

// ValidateID tells whether id follows the one rule for agent ids. The error is
// ErrInvalid and names the rule.
func ValidateID(id string) error {
	if idRule().MatchString(id) {
		return nil
	}
	shown := strconv.Quote(id)
	if len(id) > 80 {
		shown = strconv.Quote(id[:80]) + "…"
	}
	return fmt.Errorf("%w: id %s: an id is 1 to 63 characters, a-z 0-9 _ and -, the first a letter or a digit; choose another id", ErrInvalid, shown)
}

// MinMemory is the least memory limit that is taken for meant, in bytes: less is
// most likely a forgotten unit.
const MinMemory = 16 << 20

// ParseMemory reads a memory size as systemd does: bytes, or K, M, G, T with the
// base 1024, also with a fraction ("1.5G"). The result is in bytes.
func ParseMemory(s string) (uint64, error) {
	m := sizeRule().FindStringSubmatch(s)
	if m == nil {
		if up := strings.TrimSuffix(strings.TrimSuffix(strings.ToUpper(s), "B"), "I"); up != s && sizeRule().MatchString(up) {
			return 0, fmt.Errorf("%q is not a memory size: write %q", s, up)
		}
		return 0, fmt.Errorf("%q is not a memory size: write bytes, or a number with K, M, G or T, such as \"2G\"", s)
	}
	shift := map[string]uint{"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[m[3]]
	n, err := strconv.ParseUint(m[1], 10, 64)
	if err != nil || n > math.MaxInt64>>shift {
		return 0, fmt.Errorf("%q is more memory than there can be", s)
	}
	n <<= shift
	if m[2] != "" {
		f, err := strconv.ParseFloat("0."+m[2], 64)
		if err != nil {
			return 0, err
		}
		n += uint64(f * float64(uint64(1)<<shift))
	}
	if n < MinMemory {
		return 0, fmt.Errorf("%q is too little memory (at least 16M): is a unit missing, such as in \"2G\"?", s)
	}
	return n, nil
}

// ParseCPU reads a share of processor time as systemd does: whole percent of one
// CPU, "200%" for two.
func ParseCPU(s string) (int, error) {
	m := cpuRule().FindStringSubmatch(s)
	if m == nil {
		return 0, fmt.Errorf("%q is not a CPU limit: write whole percent of one CPU, such as \"200%%\" for two", s)
	}
	n, err := strconv.Atoi(m[1])
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is not a CPU limit: at least \"1%%\"", s)
	}
	return n, nil
}

// MemoryBytes is the memory limit in bytes; 0 means that none is set.
func (l Limits) MemoryBytes() (uint64, error) {
	if l.Memory == "" {
		return 0, nil
	}
	return ParseMemory(l.Memory)
}

// CPUPercent is the CPU limit in percent of one CPU; 0 means that none is set.
func (l Limits) CPUPercent() (int, error) {
	if l.CPU == "" {
		return 0, nil
	}
	return ParseCPU(l.CPU)
}

// Validate checks the limits by themselves; where names the object in the error.
func (l Limits) validate(p *invalid, where string) {
	if _, err := l.MemoryBytes(); err != nil {
		p.add("%s.memory: %v", where, err)
	}
	if _, err := l.CPUPercent(); err != nil {
		p.add("%s.cpu: %v", where, err)
	}
	if l.Tasks < 0 {
		p.add("%s.tasks: %d is not a number of tasks: write a number above 0", where, l.Tasks)
	}
}

// Validate checks every field and tells all that is wrong. Errors are ErrInvalid.
func (a *Agent) Validate() error {
	if err := ValidateID(a.ID); err != nil {
		return err
	}
	var p invalid
	text(&p, "name", a.Name, 256)
	text(&p, "permissionMode", a.PermissionMode, 128)
	switch {
	case a.Runtime == "" && a.Command == "":
		p.add("neither runtime nor command is set: name a runtime (agentconnect runtimes lists them) or a command")
	case a.Runtime != "" && a.Command != "":
		p.add("both runtime and command are set: keep one of them")
	case a.Runtime != "" && !runtimeRule().MatchString(a.Runtime):
		p.add("runtime %q: not a runtime's name (agentconnect runtimes lists them)", a.Runtime)
	}
	carried(&p, "command", a.Command)
	if a.Command != "" && (strings.HasPrefix(a.Command, "~") || (strings.ContainsRune(a.Command, '/') && !filepath.IsAbs(a.Command))) {
		p.add("command %q: write the program's name or its absolute path", a.Command)
	}
	for i, arg := range a.Args {
		carried(&p, fmt.Sprintf("args[%d]", i), arg)
	}
	if len(a.Args) > 0 && a.Command == "" {
		p.add("args without command: a runtime brings its own arguments")
	}
	if w := a.Workspace; w != "" {
		carried(&p, "workspace", w)
		switch {
		case strings.HasPrefix(w, "~"):
			p.add("workspace %q: ~ is not expanded here: write the absolute path", w)
		case filepath.IsAbs(w) && (filepath.Clean(w) != w || w == "/"):
			p.add("workspace %q: write a clean path of a project folder, without .., //, or a slash at the end", w)
		case w == "repository.git" || strings.HasPrefix(w, "repository.git/"):
			p.add("workspace %q: that is the place of the repository of an agent's own clone (`agent add --git`): choose another name", w)
		case !filepath.IsAbs(w) && (!filepath.IsLocal(w) || filepath.Clean(w) != w || w == "."):
			p.add("workspace %q: a relative workspace stays inside the agent directory: no .. in it; for a folder elsewhere write its absolute path", w)
		}
	}
	a.Git.validate(&p, a)
	oneOf(&p, "memory", a.Memory, MemoryManaged, MemoryNative, MemoryNone)
	seen := map[string]sandbox.Access{}
	for i, g := range a.Grants {
		where := fmt.Sprintf("grants[%d]", i)
		carried(&p, where+".path", g.Path)
		switch {
		case !filepath.IsAbs(g.Path):
			p.add("%s.path %q: write an absolute path", where, g.Path)
		case filepath.Clean(g.Path) != g.Path:
			p.add("%s.path %q: write it as %q", where, g.Path, filepath.Clean(g.Path))
		}
		if !slices.Contains([]sandbox.Access{sandbox.ReadOnly, sandbox.ReadWrite, sandbox.Hidden}, g.Access) {
			p.add("%s.access %q: write ro, rw or hidden", where, g.Access)
		}
		if old, ok := seen[g.Path]; ok && old != g.Access {
			p.add("%s.path %q is granted twice, %s and %s: keep one", where, g.Path, old, g.Access)
		}
		seen[g.Path] = g.Access
	}
	oneOf(&p, "read", a.Read, sandbox.ReadSystem, sandbox.ReadHost)
	oneOf(&p, "nesting", a.Nesting, "on", "off")
	oneOf(&p, "credentials", a.Credentials, CredentialsHost, CredentialsPrivate, CredentialsSecret)
	oneOf(&p, "network.mode", a.Network.Mode, NetworkModes...)
	for _, list := range []struct {
		name  string
		rules []string
	}{{"allow", a.Network.Allow}, {"deny", a.Network.Deny}} {
		for i, r := range list.rules {
			if _, err := rules.Parse(r); err != nil {
				p.add("network.%s[%d]: %v", list.name, i, err)
			}
		}
	}
	if _, err := a.Network.AskFor(); err != nil {
		p.add("network.ask: %v", err)
	}
	a.Limits.validate(&p, "limits")
	oneOf(&p, "acp.clientFiles", a.ACP.ClientFiles, "workspace")
	if c := a.Checkout; c != nil {
		if r, err := gitcred.ParseRule(c.URL); err != nil || r.Below {
			p.add("checkout.url %q: write https://HOST/OWNER/REPOSITORY", c.URL)
		}
		text(&p, "checkout.branch", c.Branch, 256)
		if strings.HasPrefix(c.Branch, "-") {
			p.add("checkout.branch %q: no branch begins with a dash", c.Branch)
		}
		if !a.Sandboxed() {
			p.add("checkout: a workspace from a repository is made inside the sandbox; turn the sandbox on for it")
		}
	}
	for i, w := range a.Allow {
		group, ok := strings.CutPrefix(w, gitConfigWord)
		if !ok || !slices.Contains(gitseal.SettingGroups, group) {
			p.add("allow[%d] %q: write %s and one of %s", i, w, gitConfigWord, strings.Join(gitseal.SettingGroups, " "))
		}
	}
	for i, c := range a.GitCredentials {
		c.validate(&p, fmt.Sprintf("gitCredentials[%d]", i))
	}
	if raw := a.MCPServers; len(raw) > 0 && raw[0] != '[' && raw[0] != '{' {
		p.add("mcpServers: write a list")
	} else if _, err := mcp.Refs(raw); err != nil {
		p.add("mcpServers: %v", err)
	}
	if raw := a.RuntimeOverrides; len(raw) > 0 && raw[0] != '{' {
		p.add("runtimeOverrides: write an object")
	} else if env, err := a.ExtraEnv(); err != nil {
		p.add("runtimeOverrides: env and secrets must be lists of {\"name\", \"value\"}")
	} else {
		names := make([]string, 0, len(env))
		for k := range env {
			names = append(names, k)
		}
		slices.Sort(names)
		for _, k := range names {
			validateEnv(&p, k, env[k])
		}
	}
	return p.err()
}

func (g Git) validate(p *invalid, a *Agent) {
	text(p, "git.clone", g.Clone, 4096)
	text(p, "git.worktree", g.Worktree, 4096)
	switch {
	case g == Git{}:
		return
	case g.Clone != "" && g.Worktree != "":
		p.add("git: clone and worktree exclude each other: keep one of them")
	case a.Workspace != "":
		p.add("workspace and git exclude each other: git makes the workspace in the agent directory; add another agent for a folder elsewhere")
	case g.Worktree != "" && (!filepath.IsAbs(g.Worktree) || filepath.Clean(g.Worktree) != g.Worktree):
		p.add("git.worktree %q: write the absolute path of a repository", g.Worktree)
	case g.Clone != "" && !a.Sandboxed():
		p.add("git.clone: without the sandbox nothing keeps the agent in its clone: use it with the sandbox, or give a workspace")
	}
	if g.Clone != "" {
		if err := gitclone.CheckSource(g.Clone); err != nil {
			p.add("git.clone: %v", err)
		}
	}
}

func (c GitCredential) validate(p *invalid, where string) {
	if _, err := gitcred.ParseRule(c.URL); err != nil {
		p.add("%s.url: %v", where, err)
	}
	text(p, where+".username", c.Username, 256)
	text(p, where+".secret", c.Secret, 64)
	sources := 0
	for _, named := range []bool{c.Secret != "", len(c.Command) > 0, c.ControlPlane} {
		if named {
			sources++
		}
	}
	switch {
	case sources != 1:
		p.add("%s: name a secret or a command, one of them", where)
	case len(c.Command) > 0 && !filepath.IsAbs(c.Command[0]):
		p.add("%s.command %q: write the program's absolute path; it runs outside the sandbox", where, c.Command[0])
	}
	for _, arg := range c.Command {
		carried(p, where+".command", arg)
	}
}

// validateEnv judges one variable. The value stays out of the message: it may be a secret.
func validateEnv(p *invalid, name, value string) {
	switch {
	case !envRule().MatchString(name):
		p.add("env %q: a name is letters, digits and _, not a digit first", name)
	case strings.HasPrefix(name, "LD_") || name == "GLIBC_TUNABLES":
		// The dynamic linker would obey it in the programs that set the boundary up.
		p.add("env %s: it would act on the boundary's own programs as well; set it in a script that starts the runtime", name)
	case strings.ContainsRune(value, 0):
		p.add("env %s: the value has a NUL byte, which no environment can hold", name)
	case !utf8.ValidString(value):
		p.add("env %s: the value is not UTF-8, which agent.json cannot hold", name)
	}
}

// NetworkModes in their order: each one reaches more than the one before.
var NetworkModes = []sandbox.NetworkMode{sandbox.NetworkNone, sandbox.NetworkAllowlist, sandbox.NetworkOpen, sandbox.NetworkHost}

// MaxAsk is the longest that something waits for the operator's word.
const MaxAsk = 10 * time.Minute

// AskFor is for how long what no rule names waits; 0: not at all.
func (n Network) AskFor() (time.Duration, error) {
	if n.Ask == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(n.Ask)
	if err != nil || d < time.Second || d > MaxAsk || d%time.Second != 0 {
		return 0, fmt.Errorf("%q is not how long to wait: write \"30s\", or from \"1s\" to \"10m\"", n.Ask)
	}
	return d, nil
}

// carried refuses what neither an argument nor JSON can hold.
func carried(p *invalid, where, s string) {
	switch {
	case strings.ContainsRune(s, 0):
		p.add("%s: has a NUL byte", where)
	case !utf8.ValidString(s):
		p.add("%s %q: is not UTF-8, which agent.json cannot hold; rename it", where, s)
	}
}

// text is for what people read.
func text(p *invalid, where, s string, size int) {
	carried(p, where, s)
	if len(s) > size {
		p.add("%s: longer than %d bytes", where, size)
	}
	if strings.ContainsFunc(s, unicode.IsControl) {
		p.add("%s: has control characters", where)
	}
}

// oneOf accepts the empty value, which means the default.
func oneOf[T ~string](p *invalid, where string, got T, want ...T) {
	if got == "" || slices.Contains(want, got) {
		return
	}
	words := make([]string, len(want))
	for i, w := range want {
		words[i] = string(w)
	}
	p.add("%s %q: write %s", where, got, strings.Join(words, " or "))
}
