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
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/gitcred"
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
	w := wire.Secret{Name: s.Name, Value: s.Value}
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
func (b *Builder) credentials(a *agent.Agent) ([]wire.Credential, error) {
	var out []wire.Credential
	for _, c := range a.GitCredentials {
		if _, err := gitcred.ParseRule(c.URL); err != nil {
			return nil, refusedConfig(a, fmt.Errorf("gitCredentials: %w", err))
		}
		if len(c.Command) > 0 {
			if err := b.hostProgram(a, c.Command); err != nil {
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

// hostProgram refuses a command that runs outside the boundary and that an agent could
// change: it, or a file among its arguments, in a folder that agents write.
func (b *Builder) hostProgram(a *agent.Agent, argv []string) error {
	var places []string // of the arguments
	for _, arg := range argv {
		if filepath.IsAbs(arg) {
			places = append(places, filepath.Clean(arg), realPath(b.Host, arg))
		}
	}
	writable, err := b.writable(a)
	if err != nil {
		return err
	}
	// Below ROOT agents, and servers with a boundary of their own, have their homes.
	for _, w := range append(writable, filepath.Join(b.Config.Root, "agents"), filepath.Join(b.Config.Root, "mcp")) {
		for _, dir := range []string{w, realPath(b.Host, w)} {
			for _, path := range places {
				if inDir(path, dir) || path == dir {
					return fmt.Errorf("%s runs outside the sandbox and lies in %s, which an agent can write; put it elsewhere", path, dir)
				}
			}
		}
	}
	return nil
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
