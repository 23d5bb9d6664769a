// Package archtest holds the rules of the repository's layout as values, and its test
// holds the code to them: which package may import what, what the small binaries must
// not link, what may lie at the top level, and that every package says what it is for.
// No program imports it.
package archtest

import (
	"fmt"
	"slices"
	"strings"
)

const module = "agentconnect.md/sandbox"

// Package is what `go list -json` tells of one package.
type Package struct {
	ImportPath   string
	Doc          string
	GoFiles      []string
	CgoFiles     []string
	Imports      []string
	TestImports  []string
	XTestImports []string
	Deps         []string // transitive, without tests
}

// rule forbids imports to the packages it covers.
type rule struct {
	name string
	// covers and but are path patterns: an import path, or one that ends in "/...".
	covers []string
	but    []string
	// forbids are the same kind of patterns.
	forbids []string
	// direct looks at the package's own imports, tests included; otherwise at
	// everything that it links.
	direct bool
	why    string
}

var bus = []string{
	"github.com/coreos/go-systemd/v22/dbus/...",
	"github.com/coreos/go-systemd/v22/login1/...",
	"github.com/coreos/go-systemd/v22/machine1/...",
	"github.com/coreos/go-systemd/v22/import1/...",
	"github.com/godbus/dbus/v5/...",
}

var rules = []rule{
	{
		name:    "bus only in dbusctl",
		covers:  []string{module + "/..."},
		but:     []string{module + "/dbusctl/..."},
		forbids: bus,
		direct:  true,
		why:     "dbusctl turns the bus's silent failures (a dead connection, an unread job channel) into errors; a second importer would have to do so again",
	},
	{
		name:    "sandbox knows neither bus nor daemon",
		covers:  []string{module + "/sandbox/..."},
		forbids: slices.Concat(bus, []string{module + "/cmd/...", module + "/dbusctl/...", module + "/units/..."}),
		why:     "the boundary is a library of its own, and its plan a pure value",
	},
	{
		name:    "sandbox tests know neither bus nor daemon",
		covers:  []string{module + "/sandbox/..."},
		forbids: slices.Concat(bus, []string{module + "/cmd/...", module + "/dbusctl/...", module + "/units/..."}),
		direct:  true,
		why:     "the boundary is a library of its own, and so are its tests",
	},
	{
		name:    "units is pure",
		covers:  []string{module + "/units/..."},
		forbids: slices.Concat(bus, []string{module + "/cmd/...", module + "/dbusctl/...", "net/...", "os/exec"}),
		why:     "names, escaping and properties are functions of their arguments",
	},
	{
		name:    "dbusctl knows no command",
		covers:  []string{module + "/dbusctl/..."},
		forbids: []string{module + "/cmd/..."},
		why:     "it is used by more than one of them",
	},
	{
		name: "small binaries stay small",
		covers: []string{
			module + "/cmd/agentconnect-supervisor",
			module + "/cmd/agentconnect-launch",
			module + "/cmd/agentconnect-guest",
		},
		forbids: []string{
			"github.com/spf13/viper/...",
			"github.com/spf13/cobra/...",
			"net/http/...",
			module + "/cmd/internal/config/...",
			module + "/cmd/internal/daemon/...",
			module + "/cmd/internal/console/...",
		},
		why: "one of each runs per agent, and each start pays for what it links",
	},
	{
		name:    "tests stay out of programs",
		covers:  programs,
		forbids: []string{"testing", module + "/cmd/internal/archtest/...", module + "/cmd/internal/testrun/..."},
		why:     "a program that links package testing ships test code",
	},
}

// matches reports whether path fits one of the patterns.
func matches(patterns []string, path string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		prefix, tree := strings.CutSuffix(pattern, "/...")
		return path == prefix || tree && strings.HasPrefix(path, prefix+"/")
	})
}

// breaches lists each package that breaks a rule, with the import that does it.
func breaches(rules []rule, packages []Package) []string {
	var found []string
	for _, r := range rules {
		for _, p := range packages {
			if !matches(r.covers, p.ImportPath) || matches(r.but, p.ImportPath) {
				continue
			}
			imports, verb := p.Deps, "links"
			if r.direct {
				imports, verb = slices.Concat(p.Imports, p.TestImports, p.XTestImports), "imports"
			}
			for _, path := range slices.Compact(slices.Sorted(slices.Values(imports))) {
				if matches(r.forbids, path) {
					found = append(found, fmt.Sprintf("%s %s %s: %s: %s", p.ImportPath, verb, path, r.name, r.why))
				}
			}
		}
	}
	return found
}

// undocumented lists the packages without a doc comment. A package of test files only
// has nothing to document.
func undocumented(packages []Package) []string {
	var found []string
	for _, p := range packages {
		if p.Doc == "" && len(p.GoFiles)+len(p.CgoFiles) > 0 {
			found = append(found, p.ImportPath)
		}
	}
	return found
}

// topLevel is everything that may lie at the top of the repository.
var topLevel = []string{
	"cmd", "units", "dbusctl", "sandbox", "packaging", "debian", "docs", ".ci",
	"go.mod", "go.sum", "README.md", "Makefile", "LICENSE", ".gitignore", ".golangci.yml",
}

// unshipped are what git, a build and editors leave there: all of them ignored by git.
var unshipped = []string{".git", "bin", "dist", "vendor", ".idea", ".vscode", ".DS_Store"}

// programs are the commands that must exist.
var programs = []string{
	module + "/cmd/agentconnect",
	module + "/cmd/agentconnect-supervisor",
	module + "/cmd/agentconnect-launch",
	module + "/cmd/agentconnect-guest",
	module + "/cmd/agentconnect-bench",
}

// linked lists the modules of others that a small program links, and what for. What it does not
// name, it may not link.
var linked = map[string]map[string]string{
	module + "/cmd/agentconnect-supervisor": {
		"golang.org/x/sys":                 "system calls",
		"golang.org/x/net":                 "the filter's assembler, SOCKS and HTTP proxies of the host, international names",
		"golang.org/x/text":                "international names, by x/net/idna",
		"github.com/miekg/dns":             "the DNS server",
		"github.com/godbus/dbus/v5":        "the service manager, by go-systemd",
		"github.com/coreos/go-systemd/v22": "the service manager, readiness, the journal",
	},
	module + "/cmd/agentconnect-launch": {"golang.org/x/sys": "system calls"},
	module + "/cmd/agentconnect-guest":  {"golang.org/x/sys": "system calls"},
}

// unlisted says which packages of others a small program links without a reason here, and which
// reasons are for nothing.
func unlisted(p Package, reasons map[string]string) (found []string) {
	used := map[string]bool{}
	for _, path := range p.Deps {
		if first, _, _ := strings.Cut(path, "/"); !strings.Contains(first, ".") || matches([]string{module + "/..."}, path) {
			continue // the standard library's, or ours
		}
		of := ""
		for name := range reasons {
			if matches([]string{name + "/..."}, path) {
				of = name
			}
		}
		if used[of] = true; of == "" {
			found = append(found, p.ImportPath+" links "+path+": say in archtest what for, or do without: one runs per agent")
		}
	}
	for name := range reasons {
		if !used[name] {
			found = append(found, p.ImportPath+" does not link "+name+" any more: take it off the list")
		}
	}
	slices.Sort(found)
	return found
}
