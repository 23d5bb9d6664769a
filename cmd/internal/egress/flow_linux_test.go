package egress

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"math/big"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// refused connects to addr, and fails unless it is reset without a byte.
func (a *caged) refused(addr string) {
	a.t.Helper()
	c, err := a.try(addr)
	n, b := 0, make([]byte, 64)
	if err == nil {
		n, err = c.Read(b)
	}
	if n > 0 || !errors.Is(err, syscall.ECONNRESET) {
		a.t.Errorf("%s: got %q and %v, want a reset", addr, b[:n], err)
	}
}

func exchange(t *testing.T, c *net.TCPConn, say, want string) {
	t.Helper()
	if _, err := c.Write([]byte(say)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, len(want))
	if _, err := io.ReadFull(c, b); err != nil || string(b) != want {
		t.Fatalf("got %q, %v, want %q", b, err, want)
	}
}

func TestAllowedNameIsReachedAndAnotherIsNot(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":8080", echo)
	w.name(t, "example.com", "A "+webA)
	w.name(t, "evil.net", "A "+webB)
	a := w.cage(t, policy("example.com"))
	c := a.connect("example.com", 8080)
	exchange(t, c, "hello", "hello") // no newline: a protocol that is none of those looked at
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(c); err != nil || len(rest) > 0 {
		t.Fatalf("got %q, %v after the end", rest, err)
	}
	r := a.record("the connection", func(r Record) bool { return r.Kind == kindTCP })
	if r.Verdict != Allowed || r.Name != "example.com" || r.Address != webA || r.Port != 8080 || r.Rule != "example.com" || r.Sent != 5 || r.Received != 5 || r.Agent != "alice" {
		t.Errorf("got %+v", r)
	}
	m := a.ask("evil.net", dns.TypeA)
	if m.Rcode != dns.RcodeNameError {
		t.Errorf("evil.net: got %v", m)
	}
	ede, ok := m.IsEdns0().Option[0].(*dns.EDNS0_EDE)
	if !ok || ede.InfoCode != dns.ExtendedErrorCodeBlocked {
		t.Errorf("got %v, want Extended DNS Error 15", m)
	}
	a.record("the denied name", func(r Record) bool { return r.Kind == kindDNS && r.Verdict == Denied && r.Name == "evil.net" })
	if w.asked("evil.net") {
		t.Error("the host's name server was asked for a name that no rule allows")
	}
	a.refused(webB + ":8080") // an address that no name was given for
	a.record("the denied address", func(r Record) bool { return r.Verdict == Denied && r.Address == webB })
	if s := a.g.Stats(); s.Allowed != 1 || s.Denied != 2 || s.Sent != 5 || s.Received != 5 {
		t.Errorf("got %+v", s)
	}
}

// certificate is a key pair for names of the tests.
func certificate(t testing.TB, names ...string) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, DNSNames: names,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

func TestAnotherServersNameInTLS(t *testing.T) {
	w := theWorld(t)
	cert, pool := certificate(t, "example.com", "evil.net", "other.example")
	w.server(t, w.internet, webA+":443", func(c net.Conn) { s := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}}); echo(s) })
	w.name(t, "example.com", "A "+webA)
	w.name(t, "other.example", "A "+webB)
	a := w.cage(t, policy("example.com", "other.example"))
	handshake := func(name string) error {
		c := tls.Client(a.connect("example.com", 443), &tls.Config{ServerName: name, RootCAs: pool})
		if err := c.Handshake(); err != nil {
			return err
		}
		if _, err := c.Write([]byte("hi")); err != nil {
			return err
		}
		_, err := io.ReadFull(c, make([]byte, 2))
		return err
	}
	if err := handshake("example.com"); err != nil {
		t.Fatal(err)
	}
	for name, why := range map[string]string{
		"evil.net":      "no rule allows",
		"other.example": "leads elsewhere", // allowed, and not here
		"":              "no server name",
	} {
		cfg := &tls.Config{ServerName: name, RootCAs: pool, InsecureSkipVerify: name == ""}
		c := tls.Client(a.connect("example.com", 443), cfg)
		err := c.Handshake()
		if err == nil || err.Error() != "remote error: tls: unrecognized name" {
			t.Errorf("%q: got %v, want an alert", name, err)
		}
		r := a.record("the refusal of "+name, func(r Record) bool { return r.Verdict == Denied && r.Seen == name && strings.Contains(r.Reason, why) })
		if r.Name != "example.com" || r.Sent != 0 {
			t.Errorf("%q: got %+v", name, r)
		}
	}
	// Refused for its address: an alert, and the name in the record.
	c := tls.Client(a.dial(webB+":443"), &tls.Config{ServerName: "evil.net"})
	if err := c.Handshake(); err == nil || err.Error() != "remote error: tls: access denied" {
		t.Errorf("got %v, want an alert", err)
	}
	a.record("what it wanted", func(r Record) bool { return r.Address == webB && r.Seen == "evil.net" && r.Verdict == Denied })
}
