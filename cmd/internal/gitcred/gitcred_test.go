package gitcred

import (
	"strings"
	"testing"
)

func TestWhichRepositoriesARuleCovers(t *testing.T) {
	for _, c := range []struct {
		rule, protocol, host, path string
		want                       bool
	}{
		{"https://github.com/acme/app", "https", "github.com", "acme/app", true},
		{"https://github.com/acme/app", "https", "github.com", "acme/app.git", true},
		{"https://github.com/acme/app.git", "https", "GitHub.com:443", "/acme/app/", true},
		{"https://github.com/acme/app", "https", "github.com.", "Acme/App", true},
		{"https://github.com/acme/app", "https", "github.com", "acme/app.git/info/lfs", true},
		{"https://github.com/acme/app", "https", "github.com", "acme/app.git/info/lfs/objects/batch", true},
		{"https://git.example/acme/app", "https", "git.example", "Acme/App", false},
		{"https://github.com/acme/*", "https", "github.com", "acme/other", true},
		{"https://github.com/acme/*", "https", "github.com", "acme", false},
		{"https://github.com/acme/*", "https", "github.com", "acme-evil/x", false},
		{"https://gitlab.example/g/*", "https", "gitlab.example", "g/sub/x.git", true},
		{"https://[::1]:8443/a/b", "https", "[0:0:0:0:0:0:0:1]:8443", "a/b.git", true},
		{"https://github.com/acme/app", "https", "github.com", "acme/other", false},
		{"https://github.com/acme/app", "https", "github.com", "acme/app2", false},
		{"https://github.com/acme/app", "https", "github.com", "acme/app/x", false},
		{"https://github.com/acme/app", "https", "github.com", "acme/app.git.git", false},
		{"https://github.com/acme/app", "https", "github.com", "x/../acme/app", false},
		{"https://github.com/acme/app", "https", "github.com", "acme//app", false},
		{"https://github.com/acme/app", "https", "github.com", "acme%2fapp", false},
		{"https://github.com/acme/app", "https", "github.com", "acme/app?x", false},
		{"https://github.com/acme/app", "https", "github.com", "acme/app#x", false},
		{"https://github.com/acme/app", "https", "github.com", "", false},
		{"https://github.com/acme/app", "https", "github.com", "acme\\app", false},
		{"https://github.com/acme/app", "https", "github.com", "acme/app\x00", false},
		{"https://github.com/acme/app", "https", "github.com", "acme/*", false},
		{"https://github.com/acme/app", "https", "evil.github.com", "acme/app", false},
		{"https://github.com/acme/app", "https", "github.com.evil.net", "acme/app", false},
		{"https://github.com/acme/app", "https", "github.com:8443", "acme/app", false},
		{"https://github.com/acme/app", "https", "github.com:0443", "acme/app", false},
		{"https://github.com/acme/app", "https", "x@github.com", "acme/app", false},
		{"https://github.com/acme/app", "https", "github.com/acme", "app", false},
		{"https://github.com/acme/app", "http", "github.com", "acme/app", false},
		{"https://github.com/acme/app", "HTTPS", "github.com", "acme/app", false},
		{"https://github.com/acme/app", "ssh", "github.com", "acme/app", false},
		{"https://github.com/acme/app", "", "", "", false},
	} {
		rule, err := ParseRule(c.rule)
		if err != nil {
			t.Fatal(err)
		}
		asked, err := Parse(c.protocol, c.host, c.path)
		if got := err == nil && rule.Covers(asked); got != c.want {
			t.Errorf("%s for %s %q %q: %v (%v)", c.rule, c.protocol, c.host, c.path, got, err)
		}
	}
}

func TestRulesThatAreNone(t *testing.T) {
	for _, text := range []string{"", "github.com/acme/app", "http://github.com/acme/app", "ssh://git@github.com/acme/app", "https://github.com", "https://github.com/", "https://github.com/*",
		"https://u:p@github.com/a/b", "https://github.com/a/b?x=1", "https://github.com/a/b#c", "https://github.com/a%2fb", "https://github.com/a/../b", "https://git hub.com/a/b", "https://github.com/a/*/b", "https://*.example/a/b"} {
		if r, err := ParseRule(text); err == nil {
			t.Errorf("%q was taken for %v", text, r)
		}
	}
}

func TestWhatACommandPrints(t *testing.T) {
	for in, want := range map[string][2]string{
		"tok\n":                           {"", "tok"},
		"tok":                             {"", "tok"},
		"username=u\npassword=p=q\n":      {"u", "p=q"},
		"protocol=https\npassword=p\n\nx": {"", "p"},
	} {
		u, p, err := ParseOutput([]byte(in))
		if err != nil || u != want[0] || p != want[1] {
			t.Errorf("%q: %q %q %v", in, u, p, err)
		}
	}
	for _, in := range []string{"", "\n", "a\nb\n", "username=u\n", "password=a\rb\n", "x\x00", strings.Repeat("x", MaxInput)} {
		if u, p, err := ParseOutput([]byte(in)); err == nil {
			t.Errorf("%.20q was taken: %q %q", in, u, p)
		}
	}
}

// A credential goes to no address that its text does not name.
func FuzzParse(f *testing.F) {
	f.Add("https", "github.com", "acme/app.git")
	f.Add("https", "[::1]:8443", "a/b")
	f.Fuzz(func(t *testing.T, protocol, host, path string) {
		r, err := Parse(protocol, host, path)
		if err != nil {
			return
		}
		again, err := ParseRule(r.String())
		if err != nil || again != r {
			t.Errorf("%q %q %q: %v, read again: %v %v", protocol, host, path, r, again, err)
		}
		if !strings.Contains(strings.ToLower(path), strings.ToLower(r.Path)) {
			t.Errorf("%q gives the path %q", path, r.Path)
		}
	})
}

func FuzzParseOutput(f *testing.F) {
	f.Add([]byte("username=u\npassword=p\n"))
	f.Add([]byte("tok\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if u, p, err := ParseOutput(b); err == nil && (p == "" || strings.ContainsAny(u+p, "\n\r\x00")) {
			t.Errorf("%q gives %q %q", b, u, p)
		}
	})
}
