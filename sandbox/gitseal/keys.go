// Which variables of a configuration make git run something or read more configuration.

package gitseal

import (
	"path/filepath"
	"slices"
	"strings"
)

// executable are the keys whose value git runs, or a file that it names: "section.name", or
// "section.*.name" with a subsection between.
var executable = keySet(`
	core.alternaterefscommand core.askpass core.editor core.fsmonitor core.gitproxy core.hookspath core.pager core.sshcommand
	alias.* pager.* sequence.editor interactive.difffilter web.browser help.browser init.templatedir
	credential.helper credential.*.helper
	filter.*.clean filter.*.smudge filter.*.process
	diff.external diff.*.command diff.*.textconv difftool.*.cmd difftool.*.path
	merge.*.driver mergetool.*.cmd mergetool.*.path guitool.*.cmd
	gpg.program gpg.*.program gpg.*.defaultkeycommand
	hook.*.command gc.recentobjectshook uploadpack.packobjectshook
	remote.*.uploadpack remote.*.receivepack remote.*.vcs remote.*.url remote.*.pushurl url.*.insteadof url.*.pushinsteadof
	browser.*.cmd browser.*.path man.*.cmd man.*.path tar.*.command trailer.*.command trailer.*.cmd
	submodule.*.update imap.tunnel instaweb.httpd lfs.*.path lfs.*.clean lfs.*.smudge lfs.customtransfer
	sendemail.sendmailcmd sendemail.tocmd sendemail.cccmd sendemail.headercmd sendemail.smtpserver
	sendemail.*.sendmailcmd sendemail.*.tocmd sendemail.*.cccmd sendemail.*.headercmd sendemail.*.smtpserver
`)

// leading are the keys that lead to further configuration or move the working tree.
var leading = keySet(`include.path includeif.*.path core.attributesfile core.worktree extensions.worktreeconfig protocol.*.allow`)

func keySet(words string) map[string]bool {
	set := map[string]bool{}
	for _, w := range strings.Fields(words) {
		set[w] = true
	}
	return set
}

// pattern is the entry's key with "*" for its subsection.
func (e Entry) pattern() string {
	if e.Sub {
		return e.Section + ".*." + e.Name
	}
	return e.Section + "." + e.Name
}

// Executable reports whether git would run what the entry says, or read more of the kind
// from where it says.
func (e Entry) Executable() bool {
	key := e.pattern()
	switch {
	case strings.HasSuffix(key, "url") || strings.HasPrefix(key, "url."):
		// The only addresses that run something by themselves.
		return strings.Contains(e.Value+e.Subsection, "ext::") || strings.HasPrefix(e.Value, "-")
	case e.Section == "submodule":
		return e.Name == "update" && strings.HasPrefix(e.Value, "!")
	case e.Section == "protocol":
		return e.Subsection == "ext" && e.Value != "never"
	case key == "core.fsmonitor":
		return !isBool(e.Value) && !e.Bare
	case e.Section == "alias":
		return true
	case e.Section == "pager":
		return !isBool(e.Value) && !e.Bare
	case e.Section == "lfs":
		return e.Name == "path" && strings.HasPrefix(e.Subsection, "customtransfer.") || executable[key]
	}
	return executable[key] || leading[key]
}

// remembers reports whether the entry has git remember how conflicts are resolved.
func (e Entry) remembers() bool {
	return e.Key() == "rerere.enabled" && (e.Bare || !strings.EqualFold(e.Value, "false"))
}

// Remembers reports whether a configuration has git remember how conflicts are resolved.
func Remembers(text string) bool {
	entries, _ := ParseConfig(text)
	return slices.ContainsFunc(entries, Entry.remembers)
}

// sparse are the variables of the file that `git sparse-checkout` makes.
var sparse = keySet(`core.sparsecheckout core.sparsecheckoutcone index.sparse`)

// OnlySparse reports whether a configuration says which files are checked out, and nothing else.
func OnlySparse(text string) bool {
	entries, err := ParseConfig(text)
	return err == nil && len(entries) > 0 && !slices.ContainsFunc(entries, func(e Entry) bool { return !sparse[e.Key()] })
}

func isBool(v string) bool {
	switch strings.ToLower(v) {
	case "", "true", "false", "yes", "no", "on", "off", "0", "1":
		return true
	}
	return false
}

// ExecutableKeys lists the entries of a configuration file that git would act on, one a
// line as "key=value", in order.
func ExecutableKeys(text string) (keys []string, err error) {
	entries, err := ParseConfig(text)
	for _, e := range entries {
		if e.Executable() {
			keys = append(keys, e.Key()+"="+e.Value)
		}
	}
	return keys, err
}

// named is a path that an entry names.
type named struct {
	path string
	// dir: a directory is expected; must: git obeys it once it appears; config: it is
	// configuration.
	dir, must, config bool
}

// names lists the paths that an entry names. base is where the file lies that holds the
// entry, top where git runs its commands.
func (e Entry) names(base, top, home string) []named {
	path := func(v, from string) string {
		switch {
		case v == "" || strings.ContainsRune(v, 0):
			return ""
		case v == "~":
			return home
		case strings.HasPrefix(v, "~/"):
			return filepath.Join(home, v[2:])
		case filepath.IsAbs(v):
			return filepath.Clean(v)
		case v[0] == '~' || v[0] == '%' || from == "":
			return ""
		}
		return filepath.Join(from, v)
	}
	one := func(p string, dir bool) []named {
		if p == "" {
			return nil
		}
		return []named{{path: p, dir: dir, must: true}}
	}
	switch e.pattern() {
	case "include.path", "includeif.*.path":
		list := one(path(e.Value, base), false)
		for i := range list {
			list[i].config = true
		}
		return list
	case "core.hookspath":
		return one(path(e.Value, top), true)
	case "init.templatedir":
		return one(path(e.Value, top), true)
	case "core.attributesfile":
		return one(path(e.Value, top), false)
	}
	if !e.Executable() {
		return nil
	}
	var out []named
	for _, word := range strings.FieldsFunc(e.Value, func(r rune) bool { return strings.ContainsRune(" \t\n'\"`;|&()<>=!,", r) }) {
		if p := path(word, top); p != "" && p != top {
			out = append(out, named{path: p})
		}
	}
	return out
}
