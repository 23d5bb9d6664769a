// Changing one variable of a configuration on behalf of an agent: the few that no program
// runs by, in values that cannot begin another one.

package gitseal

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// MaxConfig bounds a configuration that is changed, in bytes.
const MaxConfig = 1 << 20

// Setting is one variable to change. Unset takes it away.
type Setting struct {
	Key, Value string
	Unset      bool
}

var (
	flagValue   = oneOfValues("true", "false")
	rebaseValue = oneOfValues("true", "false", "merges")
)

func oneOfValues(words ...string) func(string) error {
	return func(v string) error {
		if !slices.Contains(words, v) {
			return fmt.Errorf("write %s", strings.Join(words, " or "))
		}
		return nil
	}
}

// settings are the variables that may be changed, with "*" for a branch. None names a
// program, a path, an address or an identity. A remote is named and never spelled out: git
// takes an unknown name for a path, so it has to be one that the configuration has.
var settings = map[string]func(value string) error{
	"branch.*.remote":      checkRemote,
	"branch.*.pushremote":  checkRemote,
	"branch.*.merge":       checkMerge,
	"branch.*.rebase":      rebaseValue,
	"pull.rebase":          rebaseValue,
	"pull.ff":              oneOfValues("true", "false", "only"),
	"push.autosetupremote": flagValue,
	"push.followtags":      flagValue,
	"fetch.prune":          flagValue,
	"rerere.enabled":       flagValue,
	"advice.detachedhead":  flagValue,
}

// SettingGroups are what an operator can allow.
var SettingGroups = []string{"advice.*", "branch.*", "fetch.*", "pull.*", "push.*", "rerere.*"}

// remoteName is a name that cannot be taken for an address, a path or an option.
var remoteName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$`) })

func checkRemote(v string) error {
	if v != "." && !remoteName().MatchString(v) {
		return errors.New("it is no remote's name: letters, digits, - and _")
	}
	return nil
}

func checkMerge(v string) error {
	name, ok := strings.CutPrefix(v, "refs/heads/")
	if !ok || !branchName(name) {
		return errors.New("it is no branch: write refs/heads/NAME")
	}
	return nil
}

var branchPart = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9_+=@%,#!][A-Za-z0-9_+=@%,#!.-]*$`) })

// branchName is stricter than git: nothing that a configuration, a shell or a glob reads.
func branchName(name string) bool {
	if name == "" || len(name) > 200 || name == "@" || strings.Contains(name, "..") || strings.Contains(name, "@{") {
		return false
	}
	for part := range strings.SplitSeq(name, "/") {
		if !branchPart().MatchString(part) || strings.HasSuffix(part, ".lock") || strings.HasSuffix(part, ".") {
			return false
		}
	}
	return true
}

// Check says what is wrong with a setting, and in which group it is.
func (s Setting) Check() (group string, err error) {
	section, rest, _ := strings.Cut(s.Key, ".")
	pattern := strings.ToLower(s.Key)
	if i := strings.LastIndexByte(rest, '.'); i >= 0 {
		if !branchName(rest[:i]) {
			return "", fmt.Errorf("%q: the name in the middle is no branch", s.Key)
		}
		pattern = strings.ToLower(section) + ".*" + strings.ToLower(rest[i:])
	}
	check, ok := settings[pattern]
	if !ok {
		return "", fmt.Errorf("%q: not among the variables that may be changed", s.Key)
	}
	if !s.Unset {
		if err := check(s.Value); err != nil {
			return "", fmt.Errorf("%s: %q: %w", s.Key, s.Value, err)
		}
	}
	return strings.ToLower(section) + ".*", nil
}

// Edit gives the configuration with the setting in it. What it gives reads as before, but for
// this one variable: that is checked, whatever was written.
func Edit(text string, s Setting) (string, error) {
	if _, err := s.Check(); err != nil {
		return "", err
	}
	old, err := ParseConfig(text)
	if err != nil {
		return "", err
	}
	in := Entry{}
	in.Section, in.Name, _ = strings.Cut(s.Key, ".")
	if i := strings.LastIndexByte(in.Name, '.'); i >= 0 {
		in.Subsection, in.Name, in.Sub = in.Name[:i], in.Name[i+1:], true
	}
	in.Section, in.Name, in.Value = strings.ToLower(in.Section), strings.ToLower(in.Name), s.Value
	same := func(e Entry) bool { return e.Key() == in.Key() && e.Sub == in.Sub }
	if !s.Unset && strings.HasSuffix(in.Name, "remote") && in.Sub && s.Value != "." &&
		!slices.ContainsFunc(old, func(e Entry) bool { return e.Section == "remote" && e.Subsection == s.Value && e.Name == "url" }) {
		return "", fmt.Errorf("%s: the repository has no remote %q", s.Key, s.Value)
	}
	line := in.Name + " = " + s.Value + "\n"
	if s.Unset {
		line = "" // an empty line: what follows is on one of its own
	}
	// In the place of the first one; where there is none, in a section at the end.
	out, replaced := substitute(text, line, same)
	var want []Entry
	for _, e := range old {
		if same(e) {
			if s.Unset || slices.ContainsFunc(want, same) {
				continue
			}
			e.Value, e.Bare = s.Value, false
		}
		want = append(want, e)
	}
	if !s.Unset && !replaced {
		if out != "" && !strings.HasSuffix(out, "\n") {
			out += "\n"
		}
		head := "[" + in.Section + "]"
		if in.Sub {
			head = "[" + in.Section + " \"" + in.Subsection + "\"]"
		}
		out += head + "\n\t" + line
		want = append(want, in)
	}
	got, err := ParseConfig(out)
	if err != nil || !slices.Equal(got, want) || len(out) > MaxConfig {
		return "", errors.New("the configuration cannot be changed without another change in it")
	}
	return out, nil
}

// substitute puts line in the place of the first entry that matches and takes the others away.
func substitute(text, line string, match func(Entry) bool) (out string, replaced bool) {
	var b strings.Builder
	p := &parser{text: text}
	kept := 0
	var in Entry
	for {
		c, ok := p.next()
		switch {
		case !ok:
			return b.String() + text[kept:], replaced
		case c == '#' || c == ';':
			p.comment()
		case c == '[':
			in, _ = p.section() // the text was read once already
		case isLetter(c):
			p.back()
			start := p.at
			e := in
			_ = p.entry(&e)
			if match(e) {
				b.WriteString(text[kept:start])
				if kept = p.at; line == "" || replaced {
					b.WriteByte('\n')
				} else {
					b.WriteString(line)
				}
				replaced = true
			}
		}
	}
}
