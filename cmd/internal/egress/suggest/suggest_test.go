package suggest

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
)

func use(words string) (all []Use) {
	for _, w := range strings.Fields(words) {
		i := strings.LastIndexByte(w, ':')
		u := Use{Name: w[:i]}
		fmt.Sscan(w[i+1:], &u.Port)
		if a, err := netip.ParseAddr(strings.Trim(w[:i], "[]")); err == nil {
			u.Name, u.Addr = "", a
		}
		all = append(all, u)
	}
	return all
}

func TestTheFewestRulesThatCoverWhatWasUsed(t *testing.T) {
	for used, want := range map[string]string{
		"":                                "",
		"example.com:443 example.com:443": "example.com:443",
		"registry.npmjs.org:443":          "registry.npmjs.org:443",
		"github.com:443 github.com:22":    "github",
		"github.com:443 codeload.github.com:443 a.org:1": "a.org:1 github",
		"a.org:1 a.org:2":         "a.org:1 a.org:2",
		"a.org:1 a.org:2 a.org:3": "a.org",
		"npm:1 npm:2 npm:3":       "npm.",
		"a.x.org:443 b.x.org:443 c.x.org:443 d.e.x.org:443":               "*.x.org:443",
		"a.x.org:443 b.x.org:443 c.x.org:443 d.x.org:80":                  "a.x.org:443 b.x.org:443 c.x.org:443 d.x.org:80",
		"a.github.io:443 b.github.io:443 c.github.io:443 d.github.io:443": "a.github.io:443 b.github.io:443 c.github.io:443 d.github.io:443",
		"a.co.uk:443 b.co.uk:443 c.co.uk:443 d.co.uk:443":                 "a.co.uk:443 b.co.uk:443 c.co.uk:443 d.co.uk:443",
		"10.0.0.1:5432 [2001:db8::1]:443":                                 "10.0.0.1:5432 [2001:db8::1]:443",
		"host:5432":                                                       "host:5432",
		"host:1 host:2 host:3":                                            "host:1 host:2 host:3",
	} {
		if diff := cmp.Diff(want, strings.Join(Rules(use(used)), " ")); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", used, diff)
		}
	}
}

func TestWhatIsSuggestedIsEnough(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		names := rapid.SampledFrom([]string{"github.com", "codeload.github.com", "a.example.com", "b.example.com", "c.example.com", "d.example.com", "e.f.example.com", "x.github.io", "intranet", "npm", "pypi.org", "files.pythonhosted.org"})
		used := rapid.SliceOf(rapid.Custom(func(t *rapid.T) Use {
			return Use{Name: names.Draw(t, "name"), Port: rapid.SampledFrom([]uint16{22, 80, 443, 8080}).Draw(t, "port")}
		})).Draw(t, "used")
		got := Rules(used)
		set, err := rules.Compile(rules.Policy{Allow: got})
		if err != nil {
			t.Fatal(err)
		}
		for _, u := range used {
			if !set.Decide(rules.Query{Name: u.Name, Port: u.Port}).Allowed {
				t.Errorf("%v does not cover %+v", got, u)
			}
		}
		if len(got) > len(used) {
			t.Errorf("%d rules for %d uses", len(got), len(used))
		}
	})
}
