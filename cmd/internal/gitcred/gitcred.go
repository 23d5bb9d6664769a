// Package gitcred compares repository addresses and reads git's credential words
// (gitcredentials(7)). It decides which rule an address falls under; it fetches no
// credential and does no I/O.
package gitcred

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"agentconnect.md/sandbox/cmd/internal/lazyregexp"
)

// MaxInput bounds what git or a command may say, in bytes.
const MaxInput = 64 << 10

// Repo is one repository's address, or, with Below, all addresses below a path.
type Repo struct {
	Host  string // lower case; with a port unless it is 443
	Path  string // without slashes around it and without .git; letter case as written
	Below bool
}

// String is the address as a rule is written.
func (r Repo) String() string {
	s := "https://" + r.Host + "/" + r.Path
	if r.Below {
		s = strings.TrimSuffix(s, "/") + "/*"
	}
	return s
}

// ParseRule reads a rule: https://HOST/PATH, with /* at the end for all repositories below.
func ParseRule(text string) (Repo, error) {
	bad := func(why string) (Repo, error) {
		return Repo{}, fmt.Errorf("%q: %s; write https://HOST/OWNER/REPOSITORY, or https://HOST/OWNER/* for all of an owner's", text, why)
	}
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return bad("it is no address")
	case u.Scheme != "https":
		return bad("credentials go over https alone")
	case u.User != nil:
		return bad("the address holds a user or a password")
	case u.RawQuery != "" || u.Fragment != "" || u.ForceQuery || strings.Contains(text, "#"):
		return bad("it has more than a host and a path")
	case strings.Contains(text, "%"):
		return bad("write the path without % escapes")
	}
	path, below := strings.CutSuffix(u.Path, "/*")
	r, err := Parse("https", u.Host, path)
	if err != nil {
		return bad(err.Error())
	}
	r.Below = below
	return r, nil
}

var hostRule = lazyregexp.New(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$`)

// Parse normalises what git asks for. An address that two readers could take for two
// repositories is an error.
func Parse(protocol, host, path string) (Repo, error) {
	if protocol != "https" {
		return Repo{}, fmt.Errorf("protocol %q: credentials go over https alone", printable(protocol))
	}
	h, err := normalHost(host)
	if err != nil {
		return Repo{}, err
	}
	p, err := normalPath(path)
	if err != nil {
		return Repo{}, err
	}
	return Repo{Host: h, Path: p}, nil
}

func normalHost(host string) (string, error) {
	bad := fmt.Errorf("host %q: not a host", printable(host))
	if len(host) > 300 {
		return "", bad
	}
	name, port := strings.ToLower(host), ""
	if i := strings.LastIndexByte(name, ':'); i >= 0 && !strings.HasSuffix(name, "]") {
		n, err := strconv.ParseUint(name[i+1:], 10, 16)
		if err != nil || n == 0 || strconv.FormatUint(n, 10) != name[i+1:] {
			return "", bad
		}
		if n != 443 {
			port = name[i:]
		}
		name = name[:i]
	}
	if strings.HasPrefix(name, "[") {
		a, err := netip.ParseAddr(strings.TrimSuffix(name[1:], "]"))
		if err != nil || !a.Is6() || a.Zone() != "" || !strings.HasSuffix(name, "]") {
			return "", bad
		}
		return "[" + a.String() + "]" + port, nil
	}
	name = strings.TrimSuffix(name, ".")
	if !hostRule().MatchString(name) {
		return "", bad
	}
	return name + port, nil
}

func normalPath(path string) (string, error) {
	if len(path) > 1024 {
		return "", errors.New("the path is too long")
	}
	for _, c := range []byte(path) {
		if c <= ' ' || c >= 0x7f || strings.IndexByte(`\%?#*"<>|^`+"`", c) >= 0 {
			return "", fmt.Errorf("path %q: has a character that repositories' names do not have", printable(path))
		}
	}
	p := strings.TrimSuffix(strings.TrimPrefix(path, "/"), "/")
	// Large files come from an address below the repository's own.
	if i := strings.Index(p, ".git/info/lfs"); i >= 0 && (len(p) == i+len(".git/info/lfs") || p[i+len(".git/info/lfs")] == '/') {
		p = p[:i]
	}
	p = strings.TrimSuffix(p, ".git")
	switch {
	case p == "":
		return "", errors.New("no repository is named")
	case strings.HasSuffix(p, ".git"), strings.Contains(p, ".git/info/lfs"):
		return "", fmt.Errorf("path %q: could be two repositories", printable(path))
	}
	for segment := range strings.SplitSeq(p, "/") {
		if segment == "" || segment == "." || segment == ".." {
			return "", fmt.Errorf("path %q: has empty or dotted parts", printable(path))
		}
	}
	return p, nil
}

// foldHosts compare paths without case.
var foldHosts = []string{"github.com", "gitlab.com", "bitbucket.org", "codeberg.org"}

// Covers reports whether the rule is for the repository.
func (r Repo) Covers(asked Repo) bool {
	if asked.Below || r.Host != asked.Host {
		return false
	}
	rule, path := r.Path, asked.Path
	if slices.Contains(foldHosts, r.Host) {
		rule, path = strings.ToLower(rule), strings.ToLower(path)
	}
	if r.Below {
		return strings.HasPrefix(path, rule+"/")
	}
	return rule == path
}

// Values are git's words of one credential.
type Values struct{ Protocol, Host, Path, Username, Password string }

// ReadValues reads what git writes to a helper, or a helper to git: lines of key=value up
// to an empty one. Keys that are not known are passed over, as git asks for.
func ReadValues(b []byte) (v Values, err error) {
	if len(b) > MaxInput {
		return v, errors.New("more than a credential is")
	}
	fields := map[string]*string{"protocol": &v.Protocol, "host": &v.Host, "path": &v.Path, "username": &v.Username, "password": &v.Password}
	lines := bufio.NewScanner(bytes.NewReader(b))
	lines.Buffer(nil, MaxInput+1)
	for lines.Scan() {
		line := lines.Text()
		if line == "" {
			break
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok {
			return Values{}, errors.New("a line is not key=value")
		}
		if strings.ContainsRune(value, 0) {
			return Values{}, fmt.Errorf("%s has a NUL byte", printable(key))
		}
		if key == "url" {
			if err := v.address(value); err != nil {
				return Values{}, err
			}
		} else if f := fields[key]; f != nil {
			*f = value
		}
	}
	return v, lines.Err()
}

// address takes a url= line apart.
func (v *Values) address(text string) error {
	u, err := url.Parse(text)
	if err != nil || u.Host == "" {
		return errors.New("url is no address")
	}
	v.Protocol, v.Host, v.Path = u.Scheme, u.Host, strings.TrimPrefix(u.Path, "/")
	return nil
}

// CheckAnswer judges what a source gave, before it goes inside.
func CheckAnswer(username, password string) error {
	for what, s := range map[string]string{"username": username, "password": password} {
		if strings.ContainsAny(s, "\x00\r\n") || len(s) > MaxInput/4 {
			return fmt.Errorf("the %s holds a line break or a NUL byte, or is too long", what)
		}
	}
	if password == "" {
		return errors.New("there is no password")
	}
	return nil
}

// ParseOutput reads what a command printed: git's key=value lines, or a token alone.
func ParseOutput(b []byte) (username, password string, err error) {
	text := strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r")
	if !strings.Contains(text, "\n") && !strings.HasPrefix(text, "password=") && !strings.HasPrefix(text, "username=") {
		return "", text, CheckAnswer("", text)
	}
	v, err := ReadValues(b)
	if err != nil {
		return "", "", err
	}
	return v.Username, v.Password, CheckAnswer(v.Username, v.Password)
}

// printable cuts what somebody else wrote for a message.
func printable(s string) string {
	if len(s) > 80 {
		s = s[:80] + "…"
	}
	return strings.ToValidUTF8(s, "?")
}
