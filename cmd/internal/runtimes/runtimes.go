// Package runtimes knows the ACP runtimes: how each one starts, where it keeps state
// and credentials, and where on this host its installation lies, so that the boundary
// can expose exactly that. It starts no runtime and installs nothing.
package runtimes

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"agentconnect.md/sandbox/cmd/internal/strictjson"
)

// ErrUnknown is a name that no runtime has.
var ErrUnknown = errors.New("no such runtime")

// Runtime is one ACP program and what is known of it.
type Runtime struct {
	ID    string
	Title string
	// Programs are the names that the program goes by, the current one first, or one
	// absolute path. Empty for an internal runtime.
	Programs []string
	// Args follow the program.
	Args []string
	// Env is what the program needs in its environment besides the agent's own.
	Env map[string]string
	// MemoryOff is the environment by which it keeps no memory of its own; nil where no such
	// switch is known.
	MemoryOff map[string]string
	// NPM is the package that brings the program; empty if it comes another way.
	NPM string
	// Version is the one of it that was tried: what `runtimes install` brings.
	Version string
	// StateDirs and Credentials lie below the home.
	StateDirs   []string
	Credentials []string
	// KeyEnv are the variables that hold its API keys.
	KeyEnv []string
	// Nesting is whether user namespaces inside are on by default: only for runtimes
	// that bring a sandbox of their own.
	Nesting bool
	// Inner is the sandbox of its own that it brings; empty for none that we know.
	Inner Inner
	// ReadRoots are directories that its operator's configuration adds to the installation.
	ReadRoots []string
	// Install says how to get it.
	Install string
	// Internal is a runtime of our own, started through agentconnect-guest, not Find.
	Internal bool
	// Custom is a runtime that the configuration defines or overrides.
	Custom bool
}

// Inner names a runtime's own sandbox for the commands of a model.
type Inner string

const (
	InnerClaude Inner = "claude"
	InnerCodex  Inner = "codex"
)

// Argv is the command line with program in its first place.
func (r Runtime) Argv(program string) []string {
	return append([]string{program}, r.Args...)
}

// Def is one entry of the configuration's runtimes map. The environment may also be
// written as AgentConnect does, a list of {"name", "value"}.
type Def struct {
	Command   string   `json:"command"`
	Args      []string `json:"args,omitempty"`
	Env       Env      `json:"env,omitempty"`
	ReadRoots []string `json:"readRoots,omitempty"`
	// SkillsAgentID is AgentConnect's and has no effect here.
	SkillsAgentID json.RawMessage `json:"skillsAgentId,omitempty"`
}

// Env is an environment, read from an object or from a list of {"name", "value"}.
type Env map[string]string

func (e *Env) UnmarshalJSON(b []byte) error {
	var m map[string]*string
	if json.Unmarshal(b, &m) == nil {
		*e = Env{}
		for k, v := range m {
			if v == nil {
				return fmt.Errorf("env.%s must be a string", k)
			}
			(*e)[k] = *v
		}
		return nil
	}
	var list []struct {
		Name  string `json:"name"`
		Value string `json:"value"`
	}
	if json.Unmarshal(b, &list) != nil {
		return errors.New(`env must be an object of strings, or a list of {"name", "value"}`)
	}
	*e = Env{}
	for _, p := range list {
		(*e)[p.Name] = p.Value
	}
	return nil
}

// Registry is the known runtimes with those of the configuration on top.
type Registry struct {
	byID map[string]Runtime
}

// NewRegistry puts the configuration's definitions over the built-in table. A
// definition of a known name replaces how it starts and keeps the rest.
func NewRegistry(defs map[string]Def) *Registry {
	r := &Registry{byID: map[string]Runtime{}}
	for _, rt := range table {
		r.byID[rt.ID] = rt
	}
	for name, d := range defs {
		rt, known := r.byID[name]
		if !known {
			rt = Runtime{ID: name, Title: name}
		}
		rt.Custom, rt.Internal = true, false
		if d.Command != "" {
			rt.Programs, rt.NPM, rt.Version = []string{d.Command}, "", ""
			rt.Install = "install " + d.Command + ", or correct runtimes." + name + ".command in the configuration"
		}
		if d.Command != "" || d.Args != nil {
			rt.Args = d.Args
		}
		if d.Env != nil {
			rt.Env = maps.Clone(rt.Env)
			if rt.Env == nil {
				rt.Env = map[string]string{}
			}
			maps.Copy(rt.Env, d.Env)
		}
		rt.ReadRoots = d.ReadRoots
		r.byID[name] = rt
	}
	return r
}

// Get gives the runtime of that name. The error is ErrUnknown and names the nearest.
func (r *Registry) Get(name string) (Runtime, error) {
	if rt, ok := r.byID[name]; ok {
		return rt, nil
	}
	names := slices.Sorted(maps.Keys(r.byID))
	hint := "agentconnect runtimes lists them; any other program starts with --command"
	n := strictjson.Nearest(name, names)
	if word, _, _ := strings.Cut(strings.ToLower(name), "-"); n == "" && word != "" {
		// "claude" and "claude-code" are claude-acp.
		if i := slices.IndexFunc(names, func(known string) bool { return known == word || strings.HasPrefix(known, word+"-") }); i >= 0 {
			n = names[i]
		}
	}
	if n != "" {
		hint = fmt.Sprintf("did you mean %s? %s", n, hint)
	}
	return Runtime{}, fmt.Errorf("%w: %q; %s", ErrUnknown, name, hint)
}

// All gives every runtime by id, the internal ones last.
func (r *Registry) All() []Runtime {
	list := slices.Collect(maps.Values(r.byID))
	slices.SortFunc(list, func(a, b Runtime) int {
		if a.Internal != b.Internal {
			if a.Internal {
				return 1
			}
			return -1
		}
		return cmp.Compare(a.ID, b.ID)
	})
	return list
}

// Status is one line of `agentconnect runtimes`.
type Status struct {
	ID        string   `json:"id"`
	Title     string   `json:"title"`
	Command   string   `json:"command"` // how it starts, for people
	NPM       string   `json:"npm,omitempty"`
	Installed bool     `json:"installed"`
	Path      string   `json:"path,omitempty"`   // of the program
	Reason    string   `json:"reason,omitempty"` // why it cannot be used as installed
	Install   string   `json:"install,omitempty"`
	KeyEnv    []string `json:"keyEnv,omitempty"`
	Nesting   bool     `json:"nesting"`
	Internal  bool     `json:"internal,omitempty"`
	Custom    bool     `json:"custom,omitempty"`
}

// List looks for every runtime.
func (r *Registry) List(o Options) []Status {
	var list []Status
	for _, rt := range r.All() {
		s := Status{ID: rt.ID, Title: rt.Title, NPM: rt.NPM, KeyEnv: rt.KeyEnv, Nesting: rt.Nesting, Internal: rt.Internal, Custom: rt.Custom}
		if rt.Internal {
			s.Installed = true
			s.Command = strings.Join(rt.Argv("agentconnect-guest"), " ")
			list = append(list, s)
			continue
		}
		s.Command = strings.Join(rt.Argv(rt.Programs[0]), " ")
		in, err := FindRuntime(o, rt)
		switch {
		case err == nil:
			s.Installed, s.Path = true, in.Program
		case errors.Is(err, ErrNotInstalled):
			s.Install = rt.Install
		default:
			s.Reason = err.Error()
		}
		list = append(list, s)
	}
	return list
}

// FindRuntime finds the installation of a runtime under any of its programs' names.
// An internal runtime has none: start it with the guest.
func FindRuntime(o Options, rt Runtime) (Installation, error) {
	if rt.Internal {
		return Installation{}, fmt.Errorf("%s: is part of agentconnect-guest and needs no installation", rt.ID)
	}
	o.ReadRoots = append(slices.Clone(o.ReadRoots), rt.ReadRoots...)
	o.Name = rt.ID
	for _, p := range rt.Programs {
		in, err := Find(o, p)
		if !errors.Is(err, ErrNotInstalled) {
			return in, err
		}
	}
	hint := rt.Install
	if hint == "" {
		hint = "put it on the PATH"
	}
	return Installation{}, fmt.Errorf("%w: %s (%s): %s", ErrNotInstalled, rt.ID, strings.Join(rt.Programs, ", "), hint)
}
