// The operator's own way out: an HTTP or SOCKS proxy, as the variables of the daemon's
// environment name it.

package egress

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http/httpproxy"
	socks "golang.org/x/net/proxy"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// proxy finds the proxy for a destination. A nil proxy is none.
type proxy struct {
	find func(*url.URL) (*url.URL, error)
}

// newProxy reads the variables. Its errors quote no address: there may be a password in it.
func newProxy(c wire.Proxy) (*proxy, error) {
	if c.HTTPS == "" && c.HTTP == "" && c.All == "" {
		return nil, nil
	}
	h := httpproxy.Config{HTTPSProxy: c.HTTPS, HTTPProxy: c.HTTP, NoProxy: c.No}
	if h.HTTPSProxy == "" {
		h.HTTPSProxy = c.All
	}
	if h.HTTPProxy == "" {
		h.HTTPProxy = c.All
	}
	for _, v := range []struct{ name, value string }{{"HTTPS_PROXY", h.HTTPSProxy}, {"HTTP_PROXY", h.HTTPProxy}} {
		if v.value == "" {
			continue
		}
		value := v.value
		if !strings.Contains(value, "://") {
			value = "http://" + value
		}
		u, err := url.Parse(value)
		if err != nil || u.Hostname() == "" {
			return nil, fmt.Errorf("%s (or ALL_PROXY) of the daemon's environment is not the address of a proxy; write http://HOST:PORT or socks5://HOST:PORT", v.name)
		}
		switch u.Scheme {
		case "http", "https", "socks5", "socks5h":
		default:
			return nil, fmt.Errorf("%s (or ALL_PROXY) of the daemon's environment: a proxy of kind %q is not known; http, https, socks5 are", v.name, u.Scheme)
		}
	}
	return &proxy{find: h.ProxyFunc()}, nil
}

// forHost is the proxy that leads to host:port; nil: none does.
func (p *proxy) forHost(host string, port uint16) *url.URL {
	if p == nil {
		return nil
	}
	scheme := "https"
	if port == 80 {
		scheme = "http"
	}
	u, err := p.find(&url.URL{Scheme: scheme, Host: net.JoinHostPort(host, strconv.Itoa(int(port)))})
	if err != nil {
		return nil
	}
	return u
}

// only reports whether a name that the host's own resolver does not know may be left to the
// proxy. Only for names that a rule allows: with any other the agent could have the proxy
// look up names of its own, which lead wherever their owner likes.
func (p *proxy) only(name string, set *rules.Set) bool {
	return p.forHost(name, 443) != nil && set.Decide(rules.Query{Name: name}).Reason == rules.ByRule
}

// dial connects to host:port by way of the proxy at u. Its errors do not quote the proxy's
// user and password.
func (p *proxy) dial(ctx context.Context, d *net.Dialer, u *url.URL, host string, port uint16) (stream, error) {
	defaults := map[string]string{"http": "80", "https": "443", "socks5": "1080", "socks5h": "1080"}
	at := net.JoinHostPort(u.Hostname(), orPort(u.Port(), defaults[u.Scheme]))
	c, err := d.DialContext(ctx, "tcp", at)
	if err != nil {
		return nil, fmt.Errorf("the proxy: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	var s stream = c.(*net.TCPConn)
	target := net.JoinHostPort(host, strconv.Itoa(int(port)))
	switch u.Scheme {
	case "socks5", "socks5h":
		err = socksConnect(ctx, c, at, u.User, target)
	case "https":
		t := tls.Client(c, &tls.Config{ServerName: u.Hostname()})
		if err = t.HandshakeContext(ctx); err == nil {
			s = t
			err = httpConnect(t, u.User, target)
		}
	default:
		err = httpConnect(c, u.User, target)
	}
	if err == nil && !stop() {
		err = ctx.Err()
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("the proxy %s: %w", at, err)
	}
	return s, nil
}

func orPort(port, otherwise string) string {
	if port == "" {
		return otherwise
	}
	return port
}

func socksConnect(ctx context.Context, c net.Conn, at string, user *url.Userinfo, target string) error {
	var auth *socks.Auth
	if user != nil {
		auth = &socks.Auth{User: user.Username()}
		auth.Password, _ = user.Password()
	}
	d, err := socks.SOCKS5("tcp", at, auth, nil)
	if err != nil {
		return err
	}
	on, ok := d.(interface {
		DialWithConn(ctx context.Context, c net.Conn, network, address string) (net.Addr, error)
	})
	if !ok {
		return errors.New("SOCKS on an open connection is not offered")
	}
	_, err = on.DialWithConn(ctx, c, "tcp", target)
	return err
}

// httpConnect asks for a tunnel. The answer is read byte by byte: what follows it is the
// other side's.
func httpConnect(c net.Conn, user *url.Userinfo, target string) error {
	req := "CONNECT " + target + " HTTP/1.1\r\nHost: " + target + "\r\n"
	if user != nil {
		password, _ := user.Password()
		req += "Proxy-Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte(user.Username()+":"+password)) + "\r\n"
	}
	if _, err := c.Write([]byte(req + "\r\n")); err != nil {
		return err
	}
	head := make([]byte, 0, 512)
	for headEnd(head, len(head)-1) == 0 {
		if len(head) >= maxHead {
			return errTooLong
		}
		n, err := c.Read(head[len(head) : len(head)+1])
		if n == 0 && err != nil {
			return err
		}
		if head = head[:len(head)+n]; len(head) == cap(head) {
			head = append(head, 0)[:len(head)]
		}
	}
	status, err := responseStatus(head)
	if err != nil {
		return errors.New("its answer is not HTTP")
	}
	if status/100 != 2 {
		return fmt.Errorf("it answered %d", status)
	}
	return nil
}

// invented addresses stand for names that only the operator's proxy can look up.
type invented struct {
	mu     sync.Mutex
	byName map[string]netip.Addr
	next   netip.Addr
}

// inventedRange is never anybody's: it is for benchmarks (RFC 2544).
var inventedRange = netip.MustParsePrefix("198.18.0.0/16")

const maxInvented = 4096

func newInvented() *invented {
	return &invented{byName: map[string]netip.Addr{}, next: inventedRange.Addr()}
}

// of is the address that stands for name; none when there are too many.
func (i *invented) of(name string) []netip.Addr {
	i.mu.Lock()
	defer i.mu.Unlock()
	a, ok := i.byName[name]
	if !ok {
		if len(i.byName) >= maxInvented {
			return nil
		}
		i.next = i.next.Next()
		a = i.next
		i.byName[name] = a
	}
	return []netip.Addr{a}
}

// has reports whether a stands for a name.
func (i *invented) has(a netip.Addr) bool {
	if !inventedRange.Contains(a) {
		return false
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	return len(i.byName) > 0 && a.Compare(inventedRange.Addr()) > 0 && a.Compare(i.next) <= 0
}
