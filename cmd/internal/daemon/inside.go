// What an agent gets by way of the guest: secrets, repository credentials, and the
// environment that tells programs where to find them.

package daemon

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/gitcred"
	"agentconnect.md/sandbox/cmd/internal/mcp"
	"agentconnect.md/sandbox/cmd/internal/programs"
	"agentconnect.md/sandbox/cmd/internal/secret"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
)

// insideDir is a supervisor's own directory beside its socket. Its name is short: the
// guest's socket below it must fit a socket address.
func insideDir(socket string) string {
	sum := sha256.Sum256([]byte(filepath.Base(socket)))
	return filepath.Join(filepath.Dir(socket), "in-"+hex.EncodeToString(sum[:6]))
}

// show puts the directory's parts into the view.
func show(p *sandbox.Policy, inside string) {
	p.ChannelDir, p.SecretsDir = filepath.Join(inside, "c"), filepath.Join(inside, "s")
}

// guestSocket is the guest's socket of the supervisor that listens on socket.
func guestSocket(socket string) string {
	return filepath.Join(insideDir(socket), "c", filepath.Base(sandbox.ChannelSocket))
}

// secretTime bounds the reading of an agent's secrets: each may need a decryption.
const secretTime = 60 * time.Second

// secrets reads the agent's secrets. One that a control plane placed here has none of the
// operator's: its name was the control plane's choice.
func (b *Builder) secrets(a *agent.Agent) ([]secret.Secret, error) {
	if b.Secrets == nil || b.isPlaced(a.ID) {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), secretTime)
	defer cancel()
	list, err := b.Secrets.Load(ctx, a.ID)
	if err != nil {
		return nil, refusedConfig(a, err)
	}
	return list, nil
}

func (b *Builder) isPlaced(id string) bool { return b.IsPlaced != nil && b.IsPlaced(id) }

func wireSecrets(list []secret.Secret) []wire.Secret {
	out := make([]wire.Secret, len(list))
	for i, s := range list {
		out[i] = WireSecret(s)
	}
	return out
}

// WireSecret is a secret as a supervisor gets it.
func WireSecret(s secret.Secret) wire.Secret {
	w := wire.Secret{Name: s.Name, Value: s.Value, Env: s.Env}
	if s.File {
		w.File, _ = s.FileName(s.Name)
	}
	return w
}

// secretEnv lists the variables that hold secrets: the operator's, and over them those
// that a control plane sent along.
func (b *Builder) secretEnv(a *agent.Agent, list []secret.Secret) ([]string, error) {
	env := map[string]string{}
	for _, s := range list {
		for _, v := range s.Env {
			env[v] = string(s.Value)
		}
	}
	if b.Placed != nil {
		maps.Copy(env, b.Placed(a.ID))
	}
	for _, k := range ours {
		if _, set := env[k]; set {
			return nil, refusedConfig(a, fmt.Errorf("env %s is set by the boundary itself; rename the secret", k))
		}
	}
	return environ(a, env)
}

// offer adds what tells programs of secrets' files and of the credential helper: to fixed
// what is the boundary's, where given does not say otherwise.
func (b *Builder) offer(a *agent.Agent, p sandbox.Policy, secrets []secret.Secret, fixed, given map[string]string) error {
	dir, guest, channel := sandbox.SecretsPath, sandbox.GuestPath, ""
	if !a.Sandboxed() {
		dir, guest = p.SecretsDir, p.Guest
		channel = filepath.Join(p.ChannelDir, filepath.Base(sandbox.ChannelSocket))
	}
	for _, s := range secrets {
		for _, v := range slices.Concat(s.Env, s.PathEnv) {
			if _, both := given[v]; both {
				return refusedConfig(a, fmt.Errorf("env %s is set in agent.json and by secret %s; take it out of one of them", v, s.Name))
			}
			delete(fixed, v)
		}
		for _, v := range s.PathEnv {
			fixed[v] = filepath.Join(dir, s.PathOf(s.Name, v))
		}
	}
	if channel != "" {
		fixed[wire.ChannelEnv] = channel
	}
	if len(a.GitCredentials) == 0 {
		return nil
	}
	// An empty helper first: those that /etc/gitconfig names do not hear of it.
	return addGitConfig(fixed, given, [][2]string{
		{"credential.helper", ""},
		{"credential.helper", guest + " git-credential"},
		{"credential.useHttpPath", "true"},
	})
}

// addGitConfig appends configuration for every git that the agent starts, after what the
// operator may have set the same way.
func addGitConfig(fixed, given map[string]string, entries [][2]string) error {
	at := fixed
	if _, ok := given["GIT_CONFIG_COUNT"]; ok {
		at = given
	}
	n, err := strconv.Atoi(cmp.Or(at["GIT_CONFIG_COUNT"], "0"))
	if err != nil || n < 0 || n > 1000 {
		return errors.New("env GIT_CONFIG_COUNT: not a number of entries")
	}
	for _, e := range entries {
		i := strconv.Itoa(n)
		at["GIT_CONFIG_KEY_"+i], at["GIT_CONFIG_VALUE_"+i] = e[0], e[1]
		n++
	}
	at["GIT_CONFIG_COUNT"] = strconv.Itoa(n)
	return nil
}

// credentials are the agent's rules, judged.
func (b *Builder) credentials(a *agent.Agent, look func() (*outer, error)) ([]wire.Credential, error) {
	var out []wire.Credential
	for _, c := range a.GitCredentials {
		if _, err := gitcred.ParseRule(c.URL); err != nil {
			return nil, refusedConfig(a, fmt.Errorf("gitCredentials: %w", err))
		}
		if len(c.Command) > 0 {
			o, err := look()
			if err == nil {
				err = o.judge(c.Command)
			}
			if err != nil {
				return nil, refusedConfig(a, fmt.Errorf("gitCredentials: %w", err))
			}
		}
		if c.ControlPlane && b.Supervisors == "" {
			return nil, refusedConfig(a, errors.New("gitCredentials: the control plane's are given by a daemon alone"))
		}
		out = append(out, wire.Credential{URL: c.URL, Username: c.Username, Secret: c.Secret, Command: c.Command, Daemon: c.ControlPlane})
	}
	return out, nil
}

// outer judges what runs outside the boundary for an agent, by one look at what agents can write.
type outer struct {
	b        *Builder
	writable []string // folders that agents and their servers can write, by each name
	path     string   // PATH of what runs outside: without the directories that an agent can fill
}

// outer looks at all folders that agents can write: those of all agents below ROOT, too. That takes
// its time, so it is asked for only where something runs outside.
func (b *Builder) outer(a *agent.Agent) (*outer, error) {
	writable, err := b.writable(a)
	if err != nil {
		return nil, err
	}
	if err := Answers(writable...); err != nil {
		return nil, fmt.Errorf("agent %s: what agents can write cannot be told: %w", a.ID, err)
	}
	o := &outer{b: b}
	for _, w := range append(writable, filepath.Join(b.Config.Root, "agents"), filepath.Join(b.Config.Root, "mcp")) {
		o.writable = append(o.writable, w, realPath(b.Host, w))
	}
	dirs := systemPath
	if path := getenv(b.Environ, "PATH"); path != "" && !b.Direct {
		dirs = filepath.SplitList(path)
	}
	var path []string
	for _, dir := range slices.Concat(dirs, systemPath) {
		if filepath.IsAbs(dir) && !slices.Contains(path, dir) && !slices.ContainsFunc(trail(b.Host, dir), func(p string) bool { return holder(p, o.writable) != "" }) {
			path = append(path, dir)
		}
	}
	o.path = strings.Join(path, ":")
	return o, nil
}

// judge refuses a command that an agent could change: it, a file among its arguments, what one of
// them names as its interpreter, or a link on the way to any of these, in a folder that agents write.
func (o *outer) judge(argv []string) error {
	for _, path := range o.places(argv) {
		if dir := holder(path, o.writable); dir != "" {
			return fmt.Errorf("%s runs outside the sandbox, or leads to what does, and lies in %s, which an agent can write; put it elsewhere", path, dir)
		}
	}
	return nil
}

// places are where all lies that decides what runs by a command.
func (o *outer) places(argv []string) (places []string) {
	for _, arg := range argv {
		if filepath.IsAbs(arg) {
			places = append(places, o.involved(arg, maxInterpreters)...)
		}
	}
	return places
}

// outside are the places of all that runs outside the boundary for an agent. What cannot be found
// does not run, either.
func (b *Builder) outside(a *agent.Agent) (places []string) {
	var commands [][]string
	for _, c := range a.GitCredentials {
		commands = append(commands, c.Command)
	}
	defs, _ := b.serverDefs(a)
	for _, s := range defs {
		if s.Transport != mcp.Stdio || !s.Host {
			continue
		}
		if in, err := b.findServer(a, s); err == nil {
			commands = append(commands, append([]string{in.Program}, in.Argv(s.Args...)...))
		}
	}
	if len(slices.Concat(commands...)) == 0 {
		return nil
	}
	o, err := b.outer(a)
	if err != nil {
		return nil // nor does it start
	}
	for _, argv := range commands {
		places = append(places, o.places(argv)...)
	}
	return places
}

// holder is the folder among dirs that path lies in, or "".
func holder(path string, dirs []string) string {
	for _, dir := range dirs {
		if inDir(path, dir) || path == dir {
			return dir
		}
	}
	return ""
}

const (
	// maxInterpreters is how many interpreters the kernel follows, one script to the next.
	maxInterpreters = 5
	// maxLinks is how many links it follows on one way.
	maxLinks = 40
)

// involved are the files that decide what runs when path is executed: it, each link that leads
// to it, and the same of the interpreter that its first line names.
func (o *outer) involved(path string, left int) []string {
	out := trail(o.b.Host, path)
	if left == 0 {
		return out
	}
	words := strings.Fields(firstLine(path))
	if len(words) == 0 || !filepath.IsAbs(words[0]) {
		return out
	}
	out = append(out, o.involved(words[0], left-1)...)
	if filepath.Base(words[0]) != "env" {
		return out
	}
	for _, w := range words[1:] {
		if w = strings.TrimPrefix(w, "-S"); w == "" || strings.HasPrefix(w, "-") || strings.Contains(w, "=") {
			continue
		}
		if !filepath.IsAbs(w) {
			w, _ = programs.LookIn(filepath.SplitList(o.path), w)
		}
		if w != "" {
			out = append(out, o.involved(w, left-1)...)
		}
		break
	}
	return out
}

// trail lists where the kernel comes by on its way to path: each link by its own name, and
// what is at the end.
func trail(h sandbox.Host, path string) []string {
	out := []string{filepath.Clean(path)}
	at, rest := "/", strings.Split(path, "/")
	for links := 0; len(rest) > 0; {
		part := rest[0]
		rest = rest[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			at = filepath.Dir(at)
			continue
		}
		next := filepath.Join(at, part)
		to, err := h.Readlink(next)
		if err != nil {
			at = next
			continue
		}
		out = append(out, next)
		if links++; links > maxLinks {
			return out // nor does the kernel go on
		}
		if filepath.IsAbs(to) {
			at = "/"
		}
		rest = append(strings.Split(to, "/"), rest...)
	}
	return append(out, at)
}

// firstLine is what a script's first line says after "#!"; "" for anything else.
func firstLine(path string) string {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return ""
	}
	head := make([]byte, 512) // the kernel reads 256
	n, _ := io.ReadFull(f, head)
	line, _, _ := strings.Cut(string(head[:n]), "\n")
	text, ok := strings.CutPrefix(line, "#!")
	if !ok {
		return ""
	}
	return text
}

func realPath(h sandbox.Host, path string) string {
	if real, _, err := h.Resolve(path); err == nil {
		return real
	}
	return filepath.Clean(path)
}

func inDir(path, dir string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && filepath.IsLocal(rel)
}

// memoryNotes says where an agent that is to have no memory may keep one all the same.
func memoryNotes(a *agent.Agent, s start) []string {
	if a.Memory != agent.MemoryNone || s.runtime.Internal || len(s.runtime.MemoryOff) > 0 {
		return nil
	}
	return []string{"memory none: no switch is known by which this runtime keeps no memory of its own in its private home"}
}

// ClearInside takes away what a supervisor that was killed showed inside: it holds secrets.
// One that still runs holds the lock of its socket.
func ClearInside(socket string) {
	lock, err := os.OpenFile(socket+".lock", os.O_RDWR|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
	if err != nil {
		return // it ended in order and took everything along
	}
	defer lock.Close()
	if flock(lock) != nil {
		return
	}
	ours, err := lock.Stat()
	if there, serr := os.Lstat(socket + ".lock"); err == nil && serr == nil && os.SameFile(ours, there) { // and none that the next one made
		_ = os.RemoveAll(insideDir(socket)) // the next start makes it anew in any case
	}
}
