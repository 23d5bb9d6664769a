// Package mcp reads the definitions of MCP servers, as AgentConnect writes them
// (config.json's mcpServers, by name) with what we add: "host", "sandbox", "network" with its rules, and
// values by reference to a secret. It starts none, and speaks no MCP.
package mcp

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"agentconnect.md/sandbox/cmd/internal/lazyregexp"
	"agentconnect.md/sandbox/cmd/internal/strictjson"
)

// MaxSize bounds an agent's list, in bytes; MaxServers how many it names.
const (
	MaxSize    = 1 << 20
	MaxServers = 64
)

// Transports.
const (
	Stdio = "stdio"
	HTTP  = "http"
	SSE   = "sse"
)

// Var is a variable of a server's environment, or a header: a value, or the name of one of
// the agent's secrets.
type Var struct {
	Name   string
	Value  string
	Secret string
}

// Vars are read from a list of {"name", "value"} or {"name", "secret"}, or from an object
// whose values are strings or {"secret": NAME}.
type Vars []Var

// UnmarshalJSON implements json.Unmarshaler.
func (vs *Vars) UnmarshalJSON(b []byte) error {
	type value struct {
		Name   *string `json:"name"`
		Value  *string `json:"value"`
		Secret *string `json:"secret"`
	}
	read := func(name string, v value) error {
		out := Var{Name: name}
		switch {
		case (v.Value == nil) == (v.Secret == nil):
			return fmt.Errorf("%s: give a value or the name of a secret, one of them", name)
		case v.Value != nil:
			out.Value = *v.Value
		case *v.Secret == "":
			return fmt.Errorf("%s: the name of the secret is empty", name)
		default:
			out.Secret = *v.Secret
		}
		*vs = append(*vs, out)
		return nil
	}
	*vs = nil
	if len(b) > 0 && b[0] == '[' {
		var list []json.RawMessage
		if err := json.Unmarshal(b, &list); err != nil {
			return err
		}
		for _, raw := range list {
			var v value
			if err := strictjson.Decode(raw, MaxSize, &v); err != nil {
				return err
			}
			if v.Name == nil {
				return errors.New(`each entry has a "name"`)
			}
			if err := read(*v.Name, v); err != nil {
				return err
			}
		}
		return nil
	}
	members, err := strictjson.Object(b, MaxSize)
	if err != nil {
		return err
	}
	for _, m := range members {
		var v value
		if len(m.Value) > 0 && m.Value[0] == '"' {
			v.Value = new(string)
			err = json.Unmarshal(m.Value, v.Value)
		} else {
			err = strictjson.Decode(m.Value, MaxSize, &v)
		}
		if err != nil {
			return err
		}
		if v.Name != nil {
			return fmt.Errorf("%s: the name stands in front already", m.Key)
		}
		if err := read(m.Key, v); err != nil {
			return err
		}
	}
	return nil
}

// Server is one server.
type Server struct {
	Name      string   `json:"name,omitempty"`
	Transport string   `json:"transport,omitempty"`
	Type      string   `json:"type,omitempty"` // the same word in other programs' files
	Command   string   `json:"command,omitempty"`
	Args      []string `json:"args,omitempty"`
	Env       Vars     `json:"env,omitempty"`
	ReadRoots []string `json:"readRoots,omitempty"`
	URL       string   `json:"url,omitempty"`
	Headers   Vars     `json:"headers,omitempty"`
	// Host runs it outside the agent's boundary, under the agent's supervisor.
	Host bool `json:"host,omitempty"`
	// Sandbox gives a server outside a boundary of its own: a private home and tmp, no
	// workspace of the agent's, and Network ("none" unless it says another). Allow and Deny are
	// the rules of "allowlist" and "open", as an agent's own.
	Sandbox bool     `json:"sandbox,omitempty"`
	Network string   `json:"network,omitempty"`
	Allow   []string `json:"allow,omitempty"`
	Deny    []string `json:"deny,omitempty"`
}

// Ref is one entry of an agent's list: a server of the configuration by its name, or one
// that is defined there.
type Ref struct {
	Name string
	// Raw is the definition; nil for a name alone.
	Raw json.RawMessage
}

// Reserved reports whether a name is ours.
func Reserved(name string) bool {
	name = strings.ToLower(name)
	return name == "agentconnect" || strings.HasPrefix(name, "agentconnect-") || strings.HasPrefix(name, "agentconnect_")
}

var nameRule = lazyregexp.New(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$`)

// CheckName judges a server's name.
func CheckName(name string) error {
	switch {
	case Reserved(name):
		return fmt.Errorf("MCP server %q: the name is reserved; choose another", name)
	case !nameRule().MatchString(name):
		return fmt.Errorf("MCP server %q: a name is 1 to 64 letters, digits, _ . and -, the first a letter or a digit", name)
	}
	return nil
}

// Refs reads the mcpServers of an agent: a list of names and definitions with a name, or
// an object of definitions by name.
func Refs(raw json.RawMessage) ([]Ref, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	if len(raw) > MaxSize {
		return nil, fmt.Errorf("longer than %d bytes", MaxSize)
	}
	var out []Ref
	switch raw[0] {
	case '[':
		var list []json.RawMessage
		if err := json.Unmarshal(raw, &list); err != nil {
			return nil, err
		}
		for i, e := range list {
			var r Ref
			switch {
			case len(e) > 0 && e[0] == '"':
				if err := json.Unmarshal(e, &r.Name); err != nil {
					return nil, err
				}
			case len(e) > 0 && e[0] == '{':
				var s struct {
					Name string `json:"name"`
				}
				if err := json.Unmarshal(e, &s); err != nil {
					return nil, fmt.Errorf("entry %d: %w", i+1, err)
				}
				r = Ref{Name: s.Name, Raw: e}
			default:
				return nil, fmt.Errorf("entry %d: write the name of a server, or an object that defines one", i+1)
			}
			out = append(out, r)
		}
	case '{':
		members, err := strictjson.Object(raw, MaxSize)
		if err != nil {
			return nil, err
		}
		for _, m := range members {
			out = append(out, Ref{Name: m.Key, Raw: m.Value})
		}
	default:
		return nil, errors.New("write a list of names, or of objects that define servers")
	}
	if len(out) > MaxServers {
		return nil, fmt.Errorf("more than %d servers", MaxServers)
	}
	var seen []string
	for _, r := range out {
		if err := CheckName(r.Name); err != nil {
			return nil, err
		}
		// Runtimes make tool names of them, some without case.
		if slices.Contains(seen, strings.ToLower(r.Name)) {
			return nil, fmt.Errorf("MCP server %q is named twice", r.Name)
		}
		seen = append(seen, strings.ToLower(r.Name))
	}
	return out, nil
}

// Parse reads a definition strictly.
func Parse(name string, raw json.RawMessage) (*Server, error) {
	s := &Server{}
	if err := strictjson.Decode(raw, MaxSize, s); err != nil {
		return nil, fmt.Errorf("MCP server %s: %w", name, err)
	}
	if err := s.finish(name); err != nil {
		return nil, fmt.Errorf("MCP server %s: %w", name, err)
	}
	return s, nil
}

func (s *Server) finish(name string) error {
	if err := CheckName(name); err != nil {
		return err
	}
	if s.Name != "" && s.Name != name {
		return fmt.Errorf("it names itself %q", s.Name)
	}
	s.Name = name
	if s.Type != "" && s.Transport != "" && s.Type != s.Transport {
		return errors.New("transport and type differ: keep one of them")
	}
	if s.Transport == "" {
		s.Transport = s.Type
	}
	s.Type = ""
	if s.Transport == "" {
		s.Transport = Stdio
	}
	for what, vars := range map[string]Vars{"env": s.Env, "headers": s.Headers} {
		if err := vars.check(what); err != nil {
			return err
		}
	}
	switch s.Transport {
	case Stdio:
		return s.checkStdio()
	case HTTP, SSE:
		return s.checkURL()
	}
	return fmt.Errorf("transport %q: write stdio, http or sse", s.Transport)
}

func (s *Server) checkStdio() error {
	switch {
	case s.Command == "":
		return errors.New("a stdio server needs a command")
	case s.URL != "" || len(s.Headers) > 0:
		return errors.New("url and headers go with the transports http and sse")
	case strings.Contains(s.Command, "/") && (!filepath.IsAbs(s.Command) || filepath.Clean(s.Command) != s.Command):
		return fmt.Errorf("command %q: write the program's name or its clean absolute path", s.Command)
	case s.Sandbox && !s.Host:
		return errors.New("sandbox goes with host: a server that is not outside is in the agent's own")
	case s.Network != "" && !s.Sandbox:
		return errors.New("network goes with sandbox")
	case len(s.Allow)+len(s.Deny) > 0 && s.Network != "allowlist" && s.Network != "open":
		return errors.New("allow and deny go with network allowlist or open")
	case s.Host && len(s.ReadRoots) > 0 && !s.Sandbox:
		return errors.New("readRoots go with a sandbox")
	}
	for _, a := range append([]string{s.Command}, s.Args...) {
		if strings.ContainsRune(a, 0) || !utf8.ValidString(a) {
			return errors.New("command and args are UTF-8 without a NUL byte")
		}
	}
	for _, r := range s.ReadRoots {
		if !filepath.IsAbs(r) || filepath.Clean(r) != r || strings.ContainsRune(r, 0) {
			return fmt.Errorf("readRoots %q: write absolute, clean paths", r)
		}
	}
	return nil
}

func (s *Server) checkURL() error {
	u, err := url.Parse(s.URL)
	switch {
	case s.Command != "" || len(s.Args) > 0 || len(s.Env) > 0:
		return errors.New("command, args and env go with the transport stdio")
	case s.Host || s.Sandbox || s.Network != "" || len(s.Allow)+len(s.Deny) > 0:
		return errors.New("host, sandbox and network go with the transport stdio: a server with an address is outside already")
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
		return fmt.Errorf("url %q: write http:// or https:// and a host", s.URL)
	case u.User != nil:
		return errors.New("the url holds a user or a password: put it into a header, by reference to a secret")
	}
	return nil
}

var envRule = lazyregexp.New(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)
var headerRule = lazyregexp.New("^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}$")

func (vs Vars) check(what string) error {
	rule, seen := envRule, map[string]bool{}
	if what == "headers" {
		rule = headerRule
	}
	for _, v := range vs {
		switch {
		case !rule().MatchString(v.Name):
			return fmt.Errorf("%s: %q is no name", what, v.Name)
		case seen[v.Name]:
			return fmt.Errorf("%s: %s is named twice", what, v.Name)
		case what == "env" && (strings.HasPrefix(v.Name, "LD_") || v.Name == "GLIBC_TUNABLES"):
			return fmt.Errorf("%s: %s would act on the boundary's own programs", what, v.Name)
		case strings.ContainsAny(v.Value, "\x00") || what == "headers" && strings.ContainsAny(v.Value, "\r\n"):
			return fmt.Errorf("%s: the value of %s has a NUL byte or a line break", what, v.Name)
		}
		seen[v.Name] = true
	}
	return nil
}

// EncodeRefs writes an agent's list; nil for an empty one.
func EncodeRefs(refs []Ref) (json.RawMessage, error) {
	var list []any
	for _, r := range refs {
		if r.Raw == nil {
			list = append(list, r.Name)
			continue
		}
		var object map[string]json.RawMessage
		if err := json.Unmarshal(r.Raw, &object); err != nil {
			return nil, fmt.Errorf("MCP server %s: %w", r.Name, err)
		}
		name, err := json.Marshal(r.Name)
		if err != nil {
			return nil, err
		}
		object["name"] = name
		list = append(list, object)
	}
	if list == nil {
		return nil, nil
	}
	return json.Marshal(list)
}
