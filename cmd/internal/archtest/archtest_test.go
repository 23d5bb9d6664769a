package archtest

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// platforms are those that we build for: build tags hide imports from each other.
var platforms = []struct{ goos, goarch string }{
	{"linux", "amd64"}, {"linux", "arm64"}, {"darwin", "arm64"},
}

// top is the module's root, seen from this package's folder.
var top = filepath.Join("..", "..", "..")

func list(t *testing.T, goos, goarch string) []Package {
	t.Helper()
	// -e: a package that does not compile is for the compiler to report.
	cmd := exec.CommandContext(t.Context(), "go", "list", "-e",
		"-json=ImportPath,Doc,GoFiles,CgoFiles,Imports,TestImports,XTestImports,Deps", "./...")
	cmd.Dir = top
	cmd.Env = append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, &stderr)
	}
	var packages []Package
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var p Package
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			return packages
		} else if err != nil {
			t.Fatal(err)
		}
		packages = append(packages, p)
	}
}

func TestImportRulesAndPackageDocs(t *testing.T) {
	for _, platform := range platforms {
		t.Run(platform.goos+"-"+platform.goarch, func(t *testing.T) {
			packages := list(t, platform.goos, platform.goarch)
			for _, breach := range breaches(rules, packages) {
				t.Error(breach)
			}
			for _, path := range undocumented(packages) {
				t.Errorf("%s has no package comment: say what it is for, and what it does not do", path)
			}
			for _, program := range programs {
				if !slices.ContainsFunc(packages, func(p Package) bool { return p.ImportPath == program }) {
					t.Errorf("%s is missing: the rules for it would hold for nothing", program)
				}
			}
		})
	}
}

func TestTopLevelHoldsNothingElse(t *testing.T) {
	entries, err := os.ReadDir(top)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		if name := entry.Name(); !slices.Contains(topLevel, name) && !slices.Contains(unshipped, name) {
			t.Errorf("%s lies at the top level: allowed are %s", name, strings.Join(topLevel, " "))
		}
	}
}

// The rules must catch what they are for.
func TestBreachesAreFound(t *testing.T) {
	const dbus = "github.com/godbus/dbus/v5"
	tests := []struct {
		name string
		pkg  Package
		want string // part of the one breach; empty: none
	}{
		{"dbusctl may import the bus", Package{ImportPath: module + "/dbusctl", Imports: []string{dbus}, Deps: []string{dbus}}, ""},
		{"the daemon may link it through dbusctl", Package{ImportPath: module + "/cmd/internal/daemon", Imports: []string{module + "/dbusctl"}, Deps: []string{dbus}}, ""},
		{"the daemon may not import it", Package{ImportPath: module + "/cmd/internal/daemon", Imports: []string{dbus}}, "bus only in dbusctl"},
		{"nor may its tests", Package{ImportPath: module + "/cmd/internal/daemon", XTestImports: []string{"github.com/coreos/go-systemd/v22/dbus"}}, "bus only in dbusctl"},
		{"go-systemd's other packages are free", Package{ImportPath: module + "/cmd/internal/daemon", Imports: []string{"github.com/coreos/go-systemd/v22/daemon"}}, ""},
		{"sandbox links a command's package far down", Package{ImportPath: module + "/sandbox/seccomp", Deps: []string{module + "/cmd/internal/wire"}}, "sandbox knows neither"},
		{"a sandbox test imports one", Package{ImportPath: module + "/sandbox", TestImports: []string{module + "/cmd/internal/wire"}}, "sandbox tests know neither"},
		{"units starts a program", Package{ImportPath: module + "/units", Deps: []string{"os/exec"}}, "units is pure"},
		{"the launcher links viper", Package{ImportPath: module + "/cmd/agentconnect-launch", Deps: []string{"github.com/spf13/viper/internal/encoding"}}, "small binaries"},
		{"the supervisor links HTTP", Package{ImportPath: module + "/cmd/agentconnect-supervisor", Deps: []string{"net/http"}}, "small binaries"},
		{"the command line may", Package{ImportPath: module + "/cmd/agentconnect", Deps: []string{"net/http", "github.com/spf13/cobra"}}, ""},
		{"a program links package testing", Package{ImportPath: module + "/cmd/agentconnect", Deps: []string{"testing"}}, "tests stay out"},
		{"a name that only begins alike", Package{ImportPath: module + "/cmd/agentconnect-launch", Deps: []string{"net/httpx", "github.com/spf13/viperine"}}, ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := breaches(rules, []Package{test.pkg})
			switch {
			case test.want == "" && len(got) > 0:
				t.Errorf("got %q, want none", got)
			case test.want != "" && (len(got) != 1 || !strings.Contains(got[0], test.want)):
				t.Errorf("got %q, want one of %q", got, test.want)
			}
		})
	}
}

func TestUndocumentedPackagesAreFound(t *testing.T) {
	got := undocumented([]Package{
		{ImportPath: "said", Doc: "Package said says.", GoFiles: []string{"a.go"}},
		{ImportPath: "silent", GoFiles: []string{"a.go"}},
		{ImportPath: "tests-only"},
	})
	if diff := cmp.Diff([]string{"silent"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
