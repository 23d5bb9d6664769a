package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
)

// websocketArg makes this program exchange a message over a WebSocket.
const websocketArg = "e2e-websocket"

// spoken reports whether this process was started to do that, and has.
func spoken() bool {
	if len(os.Args) != 3 || os.Args[1] != websocketArg {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, _, err := websocket.Dial(ctx, os.Args[2], nil)
	if err == nil {
		err = c.Write(ctx, websocket.MessageText, []byte("hello"))
	}
	var b []byte
	if err == nil {
		_, b, err = c.Read(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(string(b))
	return true
}

// authority is a certificate authority of the test, and a certificate of it for names.
func authority(t *testing.T, names ...string) (ca string, cert tls.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	of := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		DNSNames: names, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, of, of, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// served serves h on the host's loopback.
func served(t *testing.T, h http.Handler, cert *tls.Certificate) (port string) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ = net.SplitHostPort(l.Addr().String())
	if cert != nil {
		l = tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{*cert}})
	}
	srv := &http.Server{Handler: h}
	go srv.Serve(l)
	t.Cleanup(func() { srv.Close() })
	return port
}

// throughTheBoundary runs script inside, where PORT is the allowed server's and then another
// one's, and outside for the denied one: only there it may work.
func (s *site) throughTheBoundary(t *testing.T, script, want, allowed, denied string) {
	t.Helper()
	in := func(port string) result {
		return s.sh("alice", "PORT="+port+"; AT=host; "+script)
	}
	if r := in(allowed); r.code != 0 || !strings.Contains(r.out, want) {
		t.Errorf("what is allowed: exit %d: %s%s", r.code, r.out, r.err)
	}
	if r := in(denied); r.code == 0 || strings.Contains(r.out, want) {
		t.Errorf("what is not: exit %d: %s%s", r.code, r.out, r.err)
	}
	if out := s.outside("cd " + s.mkdir("outside") + "; PORT=" + denied + "; AT=127.0.0.1; " + script); !strings.Contains(out, want) {
		t.Errorf("the control: %s", out)
	}
}

// CASES 29.
func TestGitOverHTTPSAptAndWebSocketsObeyTheRules(t *testing.T) {
	s := newSite(t)
	s.start()
	ca, cert := authority(t, "host")
	repo := s.mkdir("repo")
	if out, err := exec.Command("sh", "-ec", `cd "$0"; git init -q -b main w; cd w; git config user.name a; git config user.email a@example.com
		echo text of the repository > f; git add f; git commit -qm first; cd ..; git clone -q --bare w r.git; git -C r.git update-server-info`, repo).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	mux := http.NewServeMux()
	mux.Handle("/git/", http.StripPrefix("/git/", http.FileServer(http.Dir(repo))))
	tlsAllowed, tlsDenied := served(t, mux, &cert), served(t, mux, &cert)
	plain := http.NewServeMux()
	plain.HandleFunc("/ws", func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		defer c.CloseNow()
		for {
			kind, b, err := c.Read(r.Context())
			if err != nil {
				return
			}
			if err := c.Write(r.Context(), kind, append([]byte("answer to "), b...)); err != nil {
				return
			}
		}
	})
	plain.HandleFunc("/apt/Packages", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "Package: of-the-test\nVersion: 1\nArchitecture: all\nMaintainer: a <a@example.com>\nFilename: ./x.deb\nSize: 1\nSHA256: "+strings.Repeat("0", 64)+"\nDescription: x\n")
	})
	allowed, denied := served(t, plain, nil), served(t, plain, nil)
	s.add("alice", "--network", "allowlist", "--allow", "host:"+tlsAllowed, "--allow", "host:"+allowed)
	work := s.workspace("alice")
	s.write(filepath.Join(work, "ca.pem"), ca)
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	s.executable(s.write(filepath.Join(work, "client"), string(self)))
	t.Run("git over https", func(t *testing.T) {
		s.throughTheBoundary(t, `d=$(mktemp -d) && GIT_SSL_CAINFO=`+work+`/ca.pem git clone -q https://$AT:$PORT/git/r.git $d/c && cat $d/c/f`, "text of the repository", tlsAllowed, tlsDenied)
	})
	t.Run("websocket", func(t *testing.T) {
		s.throughTheBoundary(t, work+"/client "+websocketArg+" ws://$AT:$PORT/ws", "answer to hello", allowed, denied)
	})
	t.Run("apt-get", func(t *testing.T) {
		if _, err := exec.LookPath("apt-get"); err != nil {
			t.Skip("missing: apt-get")
		}
		s.throughTheBoundary(t, `d=$(mktemp -d) && mkdir -p $d/lists/partial $d/cache/archives/partial $d/parts && touch $d/status && echo "deb [trusted=yes] http://$AT:$PORT/apt ./" > $d/sources.list &&
			set -- -q -o Dir::Etc::sourcelist=$d/sources.list -o Dir::Etc::sourceparts=$d/parts -o Dir::State=$d -o Dir::State::lists=$d/lists -o Dir::Cache=$d/cache -o Dir::State::status=$d/status -o Acquire::Retries=0 -o APT::Sandbox::User= -o APT::Update::Error-Mode=any &&
			apt-get "$@" update && apt-cache "$@" show of-the-test`, "Package: of-the-test", allowed, denied)
	})
}

// CASES 29.
func TestPsqlObeysTheRules(t *testing.T) {
	s := newSite(t)
	bin := ""
	if all, _ := filepath.Glob("/usr/lib/postgresql/*/bin/postgres"); len(all) > 0 {
		bin = filepath.Dir(all[len(all)-1])
	}
	if _, err := exec.LookPath("psql"); err != nil || bin == "" {
		t.Skip("missing: psql and a PostgreSQL server")
	}
	s.start()
	server := func(name string) (port string) {
		dir := s.mkdir(name)
		if out, err := exec.Command(bin+"/initdb", "-D", dir, "-U", "me", "-A", "trust", "--no-sync", "--locale=C").CombinedOutput(); err != nil {
			t.Fatalf("initdb: %v: %s", err, out)
		}
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		_, port, _ = net.SplitHostPort(l.Addr().String())
		l.Close()
		cmd := exec.Command(bin+"/postgres", "-D", dir, "-p", port, "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "fsync=off")
		var said output
		cmd.Stdout, cmd.Stderr = &said, &said
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Signal(os.Interrupt); cmd.Wait() })
		s.until("PostgreSQL answers", func() bool {
			return exec.Command("psql", "-h", "127.0.0.1", "-p", port, "-U", "me", "-d", "postgres", "-c", "select 1").Run() == nil
		})
		return port
	}
	allowed, denied := server("pg1"), server("pg2")
	s.add("alice", "--network", "allowlist", "--allow", "host:"+allowed)
	s.throughTheBoundary(t, `psql -h $AT -p $PORT -U me -d postgres -Atc "select 'from ' || 'the database'"`, "from the database", allowed, denied)
}
