package egress

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const resolveC = `#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <arpa/inet.h>
int main(int n, char **a) {
	struct addrinfo h, *r, *i;
	char s[64];
	memset(&h, 0, sizeof h);
	h.ai_socktype = SOCK_STREAM;
	int e = getaddrinfo(a[1], 0, &h, &r);
	if (e) { printf("%s\\n", gai_strerror(e)); return 1; }
	for (i = r; i; i = i->ai_next) {
		void *p = i->ai_family == AF_INET ? (void *)&((struct sockaddr_in *)i->ai_addr)->sin_addr : (void *)&((struct sockaddr_in6 *)i->ai_addr)->sin6_addr;
		puts(inet_ntop(i->ai_family, p, s, sizeof s));
	}
	return 0;
}
`

const resolveJava = `public class Resolve { public static void main(String[] a) throws Exception { for (var i : java.net.InetAddress.getAllByName(a[0])) System.out.println(i.getHostAddress()); } }`

// CASES 29, 32: each resolver that programs bring reads the generated files its own way, and
// hosts name other sources than DNS in nsswitch.conf, which are not there inside.
func TestResolversOfEveryKind(t *testing.T) {
	w := theWorld(t)
	w.name(t, "www.corp.example", "A "+webA)
	w.name(t, "six.corp.example", "AAAA "+web6)
	w.name(t, "far.corp.example", "CNAME www.elsewhere.example.")
	w.name(t, "www.elsewhere.example", "A "+webB)
	w.name(t, "secret.evil.net", "A "+webB)
	w.cage(t, policy("*.corp.example"))
	dir := t.TempDir()
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	type kind struct {
		env  []string
		argv []string // NAME stands for what is looked up
	}
	kinds := map[string]kind{
		"getent":     {argv: []string{"getent", "ahosts", "NAME"}},
		"python":     {argv: []string{"/usr/bin/python3", "-c", "import socket; [print(i[4][0]) for i in socket.getaddrinfo('NAME', 1, type=socket.SOCK_STREAM)]"}},
		"node":       {argv: []string{"node", "-e", "require('dns').lookup('NAME', {all: true}, (e, a) => { console.log(e ? e.code : a.map(x => x.address).join(' ')); process.exit(e ? 1 : 0) })"}},
		"go":         {env: []string{justLookUp + "=NAME", "GODEBUG=netdns=go"}, argv: []string{self}},
		"go by libc": {env: []string{justLookUp + "=NAME", "GODEBUG=netdns=cgo"}, argv: []string{self}},
	}
	// Those that have to be compiled first.
	for name, c := range map[string]struct{ compile, argv []string }{
		"glibc": {[]string{"gcc", "-o", filepath.Join(dir, "glibc"), write("resolve.c", resolveC)}, []string{filepath.Join(dir, "glibc"), "NAME"}},
		"musl":  {[]string{"musl-gcc", "-static", "-o", filepath.Join(dir, "musl"), write("resolve.c", resolveC)}, []string{filepath.Join(dir, "musl"), "NAME"}},
		"java":  {[]string{"javac", "-d", dir, write("Resolve.java", resolveJava)}, []string{"java", "-XX:TieredStopAtLevel=1", "-cp", dir, "Resolve", "NAME"}},
	} {
		if _, err := exec.LookPath(c.compile[0]); err != nil {
			t.Run(name, func(t *testing.T) { t.Skipf("missing: %s", c.compile[0]) })
		} else if out, err := exec.Command(c.compile[0], c.compile[1:]...).CombinedOutput(); err != nil {
			t.Errorf("%q: %v: %s", c.compile, err, out)
		} else {
			kinds[name] = kind{argv: c.argv}
		}
	}
	if m, _ := filepath.Glob("/lib/*/libnss_resolve.so.2"); m == nil {
		t.Log("without libnss_resolve: nsswitch.conf names a module that is not there")
	}
	switches := map[string]string{
		"dns":         "hosts: files dns\n",
		"nss-resolve": "hosts: mymachines resolve [!UNAVAIL=return] files myhostname dns\n",
		"no dns":      "", // the line is missing: glibc's default
	}
	for name, k := range kinds {
		for which, nss := range switches {
			if which != "dns" && name != "glibc" && name != "getent" {
				continue // the others ask glibc, or look at no such file
			}
			t.Run(name+" "+which, func(t *testing.T) {
				if _, err := exec.LookPath(k.argv[0]); err != nil {
					t.Skipf("missing: %s", k.argv[0])
				}
				look := func(host string) (string, error) {
					with := func(all []string) []string {
						out := make([]string, len(all))
						for i, s := range all {
							out[i] = strings.ReplaceAll(s, "NAME", host)
						}
						return out
					}
					return w.program(t, map[string]string{
						"/etc/resolv.conf": "nameserver 9.9.9.9\nsearch corp.example\n", "/etc/nsswitch.conf": "passwd: files\n" + nss, "/etc/hosts": "127.0.0.1 localhost\n",
					}, with(k.env), with(k.argv)...)
				}
				for host, want := range map[string]string{
					"www.corp.example": webA, "www": webA, "six.corp.example": web6, "far.corp.example": webB, "WWW.Corp.Example": webA, "localhost": "127.0.0.1",
				} {
					if out, err := look(host); err != nil || !strings.Contains(out, want) && !(want == web6 && strings.Contains(out, "2606:2800:220:0:0:0:0:34")) {
						t.Errorf("%s: %v, %s", host, err, out)
					}
				}
				for _, host := range []string{"secret.evil.net", "www.elsewhere.example", "nowhere"} {
					if out, err := look(host); err == nil || strings.Contains(out, webB) {
						t.Errorf("%s is known: %s", host, out)
					}
				}
			})
		}
	}
	if w.asked("evil.net") || w.asked("secret") {
		t.Error("a denied name was asked for outside")
	}
}
