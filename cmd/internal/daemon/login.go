package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/logins"
	"agentconnect.md/sandbox/cmd/internal/runtimes"
)

// loginKinds are the logins that can be carried to a private home.
var loginKinds = map[runtimes.Inner]logins.Kind{runtimes.InnerClaude: logins.Claude, runtimes.InnerCodex: logins.Codex}

// login is whose login the agent gets a copy of.
func (b *Builder) login(a *agent.Agent, rt runtimes.Runtime) (logins.Kind, error) {
	switch a.Credentials {
	case agent.CredentialsSecret:
		switch held, err := b.keySecret(a, rt); {
		case err != nil:
			return "", refusedConfig(a, err)
		case len(rt.KeyEnv) == 0:
			return "", refusedConfig(a, fmt.Errorf("credentials secret: the variable of this runtime's key is not known; set a secret with --env VARIABLE and use --credentials private"))
		case !held && b.Secrets != nil:
			return "", refusedConfig(a, fmt.Errorf("credentials secret: no secret holds the runtime's key; run `agentconnect secret set %s KEY --env %s`, with the key on stdin", a.ID, rt.KeyEnv[0]))
		}
		return "", nil
	case agent.CredentialsHost:
	default:
		return "", nil
	}
	kind, known := loginKinds[rt.Inner]
	switch {
	case !a.Sandboxed():
		return "", refusedConfig(a, fmt.Errorf("credentials host: without the sandbox the runtime uses your login anyway; run `agentconnect agent edit %s --credentials private`", a.ID))
	case !known:
		return "", refusedConfig(a, fmt.Errorf("credentials host: only the logins of Claude Code and Codex can be carried over; log in inside (`agentconnect agent shell %s`) or give a key with --env", a.ID))
	}
	return kind, nil
}

// keySecret reports whether a secret of the agent is the runtime's key.
func (b *Builder) keySecret(a *agent.Agent, rt runtimes.Runtime) (bool, error) {
	if b.Placed != nil {
		for v := range b.Placed(a.ID) {
			if slices.Contains(rt.KeyEnv, v) {
				return true, nil
			}
		}
	}
	if b.Secrets == nil || b.isPlaced(a.ID) {
		return false, nil
	}
	list, err := b.Secrets.List(a.ID)
	if err != nil {
		return false, err
	}
	for _, s := range list {
		for _, v := range s.Env {
			if slices.Contains(rt.KeyEnv, v) {
				return true, nil
			}
		}
	}
	return false, nil
}

// LoginHint says that the agent's runtime is not logged in, as far as files and variables tell,
// and how to; "" if it is, or where nothing is known.
func (b *Builder) LoginHint(a *agent.Agent) string {
	rt, err := runtimes.NewRegistry(b.Config.Runtimes).Get(a.Runtime)
	if err != nil {
		return "" // said where the runtime is looked for
	}
	return b.loginHint(a, rt)
}

func (b *Builder) loginHint(a *agent.Agent, rt runtimes.Runtime) string {
	if len(rt.Credentials) == 0 {
		return ""
	}
	extra, err := a.ExtraEnv()
	if err != nil {
		return ""
	}
	for _, name := range rt.KeyEnv {
		if extra[name] != "" || rt.Env[name] != "" {
			return ""
		}
	}
	if held, err := b.keySecret(a, rt); held || err != nil {
		return ""
	}
	home := b.Config.Home
	if a.Sandboxed() && a.Credentials != agent.CredentialsHost {
		home = b.Store.Dirs(a.ID).Home
	}
	// The first is the login; others only name its account. Looked at, not read: in a private
	// home it is the agent's.
	if st, err := os.Lstat(filepath.Join(home, rt.Credentials[0])); err == nil && st.Size() > 0 {
		return ""
	}
	if a.Credentials == agent.CredentialsHost {
		return fmt.Sprintf("%s: you are not logged in yourself: log in on this machine, and the agent has it", rt.Title)
	}
	how := "log in with `agentconnect agent shell " + a.ID + "`"
	if _, ok := loginKinds[rt.Inner]; ok && a.Sandboxed() {
		how += ", or share your own login with `agentconnect agent edit " + a.ID + " --credentials host`"
	}
	if len(rt.KeyEnv) > 0 {
		how += ", or give a key with `agentconnect secret set " + a.ID + " KEY --env " + rt.KeyEnv[0] + "`"
	}
	return fmt.Sprintf("%s is not logged in: %s", rt.Title, how)
}
