package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"agentconnect.md/sandbox/cmd/internal/agent"
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

// And every key of agent.json, but what a control plane alone says.
func TestConfigurationPageNamesEveryKeyOfAnAgent(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "..", "packaging", "man", "agentconnect.json.5"))
	if err != nil {
		t.Fatal(err)
	}
	page := strings.ReplaceAll(string(b), `\-`, "-")
	_, page, _ = strings.Cut(page, "\n.SH AGENT.JSON\n")
	var looked int
	var each func(of reflect.Type, in string)
	each = func(of reflect.Type, in string) {
		for i := range of.NumField() {
			f := of.Field(i)
			key, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			if key == "-" || key == "checkout" || key == "controlPlane" {
				continue
			}
			looked++
			switch {
			case in == "" && !strings.Contains(page, "\n.B "+key+"\n") && !strings.Contains(page, "\n.BR "+key+" ") && !strings.Contains(page, `" `+key+"\n") && !strings.Contains(page, `" `+key+` "`):
				t.Errorf("agentconnect.json(5) lacks %s", key)
			case in != "" && !strings.Contains(page, `"`+key+`"`):
				t.Errorf("agentconnect.json(5) lacks %q of %s", key, in)
			}
			of := f.Type
			if of.Kind() == reflect.Slice {
				of = of.Elem()
			}
			if of.Kind() == reflect.Struct {
				each(of, key)
			}
		}
	}
	each(reflect.TypeFor[agent.Agent](), "")
	if looked < 30 {
		t.Errorf("only %d keys were looked at", looked)
	}
}

// What a person copies has to be taken without a word.
func TestExamplesAreValid(t *testing.T) {
	examples := filepath.Join("..", "..", "packaging", "examples")
	root := t.TempDir()
	if err := os.Chmod(root, 0o700); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(examples, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "config.json"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := config.Load(config.Options{Root: root})
	if err != nil {
		t.Fatal(err)
	}
	if len(cfg.Warnings) > 0 || !cfg.RequireSandbox {
		t.Errorf("warnings %q, required %v", cfg.Warnings, cfg.RequireSandbox)
	}
	err = filepath.WalkDir(examples, func(path string, _ os.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".json" {
			return err
		}
		b, err := os.ReadFile(path)
		if err == nil && !json.Valid(b) {
			t.Errorf("%s is no JSON", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	b, err = os.ReadFile(filepath.Join(examples, "agents.d", "docs.json"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := agent.Parse(b); err != nil {
		t.Error(err)
	}
}
