package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"agentconnect.md/sandbox/cmd/internal/config"
)

// Every command that help shows has a page, and every flag that it shows stands there.
func TestManPagesNameEveryCommandAndFlag(t *testing.T) {
	dir := t.TempDir()
	a := system()
	if code := run(a, []string{"man", dir}); code != 0 {
		t.Fatalf("man: exit code %d", code)
	}
	flags := 0
	var each func(c *cobra.Command)
	each = func(c *cobra.Command) {
		if c.Hidden || c.Name() == "help" || c.Name() == "completion" {
			return
		}
		b, err := os.ReadFile(filepath.Join(dir, strings.ReplaceAll(c.CommandPath(), " ", "-")+".1"))
		if err != nil {
			t.Error(err)
			return
		}
		page := string(b)
		for _, set := range []*pflag.FlagSet{c.NonInheritedFlags(), c.InheritedFlags()} {
			set.VisitAll(func(f *pflag.Flag) {
				if f.Hidden {
					return
				}
				flags++
				if !strings.Contains(page, "\n.B "+roff("--"+f.Name)) && !strings.Contains(page, ", "+roff("--"+f.Name)) {
					t.Errorf("%s(1) lacks --%s", c.CommandPath(), f.Name)
				}
			})
		}
		if c.Short == "" {
			t.Errorf("%s says nothing of itself", c.CommandPath())
		}
		for _, sub := range c.Commands() {
			each(sub)
		}
	}
	each(a.command())
	if flags < 30 {
		t.Errorf("only %d flags were looked at", flags)
	}
	if _, err := exec.LookPath("mandoc"); err == nil {
		pages, _ := filepath.Glob(filepath.Join(dir, "*.1"))
		if out, err := exec.Command("mandoc", append([]string{"-T", "lint", "-W", "warning"}, pages...)...).CombinedOutput(); err != nil {
			t.Errorf("mandoc: %v\n%s", err, out)
		}
	}
}

func TestTextIsNotTakenForMarkup(t *testing.T) {
	for text, want := range map[string]string{
		".SH X":      `\&.SH X`,
		"a\n'b":      "a\n\\&'b",
		`C:\dir`:     `C:\edir`,
		"--no-flag":  `\-\-no\-flag`,
		"`cmd` ~ a…": `\(gacmd\(ga \(ti a...`,
	} {
		if got := roff(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// agentconnect.json(5) is written by hand: it must name every key that has an effect.
func TestConfigurationPageNamesEveryKey(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "..", "packaging", "man", "agentconnect.json.5"))
	if err != nil {
		t.Fatal(err)
	}
	page := strings.ReplaceAll(string(b), `\-`, "-")
	for _, key := range config.Keys() {
		if !strings.Contains(page, "\n.B "+key+"\n") && !strings.Contains(page, "\n.BR "+key+" ") && !strings.Contains(page, "\n.B "+key+" ") {
			t.Errorf("agentconnect.json(5) lacks %s", key)
		}
	}
}
