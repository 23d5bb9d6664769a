package sandbox

import (
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// sealed gives the mounts of a plan that come of seals, as "how target access".
func sealedMounts(p *Plan) []string {
	var out []string
	for _, m := range p.Mounts {
		if m.Sealed {
			how := string(m.Op)
			if m.Pinned {
				how = "pin"
			}
			out = append(out, how+" "+m.Target+" "+string(m.Access))
		}
	}
	return out
}

const app = "/home/alice/src/app"

func TestSealsBecomeMountsWithEveryFolderAbovePinned(t *testing.T) {
	p, h := alice(), debian()
	p.Workspace = app
	h.file(app+"/.git/config", "").link(app+"/n/.git", "../real").dir(app+"/real", app+"/.claude", app+"/.vscode")
	p.Seals = []Seal{
		{Path: app + "/.git/hooks", Kind: KindDir, How: SealReadOnly, Why: "x"},
		{Path: app + "/.git/config", Kind: KindFile, How: SealReadOnly, Why: "x"},
		{Path: app + "/n/.git", How: SealFile, Text: "gitdir: /x\n", Why: "x"},
		{Path: app + "/.claude", Kind: KindDir, How: SealTrusted, Why: "x"},
		{Path: app + "/.vscode", Kind: KindDir, How: SealTrusted, Why: "x"},
		{Path: "/srv/elsewhere", Kind: KindDir, How: SealReadOnly, Why: "not in view"},
	}
	p.Grants = []Grant{{app + "/.vscode", ReadWrite}}
	want := []string{
		"bind " + app + "/.claude ro", "pin " + app + "/.git rw", "bind " + app + "/.git/config ro", "bind " + app + "/.git/hooks ro", "pin " + app + "/n rw", "cover " + app + "/n/.git ro",
	}
	if d := cmp.Diff(want, sealedMounts(mustCompile(t, p, h))); d != "" {
		t.Error(d)
	}
	// The order of what was found has no meaning.
	slices.Reverse(p.Seals)
	if d := cmp.Diff(want, sealedMounts(mustCompile(t, p, h))); d != "" {
		t.Errorf("reversed: %s", d)
	}
	// Where the operator's grant is read-only already, nothing is to be sealed.
	p.Grants = []Grant{{app + "/.git", ReadOnly}}
	p.Seals = p.Seals[len(p.Seals)-2:]
	if got := sealedMounts(mustCompile(t, p, h)); len(got) != 0 {
		t.Errorf("in a read-only grant: %q", got)
	}
}

// A grant of the very file opens no more than one of the folder that it lies in.
func TestGrantedControlFileStaysSealed(t *testing.T) {
	p, h := alice(), debian()
	p.Workspace = app
	h.file(app+"/.git/config", "")
	p.Grants = []Grant{{app + "/.git/config", ReadWrite}}
	for how, want := range map[SealKind]string{SealReadOnly: "bind ", SealFile: "cover "} {
		p.Seals = []Seal{{Path: app + "/.git/config", Kind: KindFile, How: how, Why: "x"}}
		if got := sealedMounts(mustCompile(t, p, h)); !slices.Contains(got, want+app+"/.git/config ro") {
			t.Errorf("%v: %q", how, got)
		}
	}
}

func TestSealThatIsGoneIsAChangedError(t *testing.T) {
	p, h := alice(), debian()
	p.Workspace = app
	p.Seals = []Seal{{Path: app + "/.git/gone", Kind: KindFile, How: SealReadOnly}}
	if _, err := Compile(p, h); !errors.As(err, new(*ChangedError)) {
		t.Errorf("%v", err)
	}
}

func TestRepositoryOfALinkedWorktreeIsReadOnlyWithIslands(t *testing.T) {
	p, h := alice(), debian()
	p.Workspace = app
	main := "/home/alice/src/main/.git"
	h.dir(main+"/objects", main+"/refs", main+"/hooks", main+"/worktrees/app", "/home/alice/.ssh/.git/objects")
	h.file(main+"/worktrees/app/gitdir", "")
	p.Seals = []Seal{
		{Path: main, Kind: KindDir, How: SealOutside, Why: "x"},
		{Path: main + "/objects", Kind: KindDir, How: SealIsland, Why: "x"},
		{Path: main + "/worktrees/app", Kind: KindDir, How: SealIsland, Why: "x"},
		{Path: main + "/worktrees/app/gitdir", Kind: KindFile, How: SealReadOnly, Why: "x"},
		{Path: "/home/alice/.ssh/.git", Kind: KindDir, How: SealOutside, Why: "y"},
		{Path: "/home/alice/.ssh/.git/objects", Kind: KindDir, How: SealIsland, Why: "y"},
	}
	plan := mustCompile(t, p, h)
	for path, want := range map[string]Access{
		main + "/hooks": ReadOnly, main + "/HEAD": ReadOnly, main + "/objects/x": ReadWrite, main + "/refs/x": ReadOnly,
		main + "/worktrees/app/HEAD": ReadWrite, main + "/worktrees/app/gitdir": ReadOnly, main + "/worktrees/other": ReadOnly,
	} {
		if got := plan.Explain(path); got.Access != want || got.Source != path {
			t.Errorf("%s: %+v, want %s", path, got, want)
		}
	}
	// A grant is judged: what may not be granted is not shown, nor an island in it.
	for _, path := range []string{"/home/alice/.ssh/.git", "/home/alice/.ssh/.git/objects", "/home/alice/src/main/file"} {
		if got := plan.Explain(path); got.Source == path {
			t.Errorf("%s is shown: %+v", path, got)
		}
	}
	if !slices.ContainsFunc(plan.Notes, func(n string) bool { return len(n) > 0 && n[0] == 'y' }) {
		t.Errorf("not said: %q", plan.Notes)
	}
}

// The source of a seal is what a link in the agent's own folder leads to.
func TestSealShowsNothingThatTheAgentCannotWrite(t *testing.T) {
	p, h := alice(), debian()
	p.Workspace = app
	h.file("/home/alice/.ssh/id_rsa", "key").file(app+"/real", "").link(app+"/.git/config", "/home/alice/.ssh/id_rsa").link(app+"/.git/inner", app+"/real")
	p.Seals = []Seal{
		{Path: app + "/.git/config", Kind: KindFile, Source: "/home/alice/.ssh/id_rsa", How: SealReadOnly, Why: "x"},
		{Path: app + "/.git/inner", Kind: KindFile, Source: app + "/real", How: SealReadOnly, Why: "x"},
	}
	want := []string{"pin " + app + "/.git rw", "cover " + app + "/.git/config ro", "bind " + app + "/.git/inner ro"}
	plan := mustCompile(t, p, h)
	if d := cmp.Diff(want, sealedMounts(plan)); d != "" {
		t.Error(d)
	}
	for _, m := range plan.Mounts {
		if m.Source == "/home/alice/.ssh/id_rsa" {
			t.Errorf("shown: %+v", m)
		}
	}
}
