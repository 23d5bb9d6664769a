// The two ends of a measured connection: a server, and a client that is run with and without
// a boundary around it.

package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	peerArg   = "peer" // the first argument of a process that is an end
	peerBlock = 256 << 10
)

// peer is such a process, until its input ends.
func peer(args []string) error {
	switch {
	case len(args) == 1 && args[0] == "server":
		return peerServer()
	case len(args) == 2 && args[0] == "client":
		return peerClient(args[1])
	case len(args) == 2 && args[0] == "frames":
		return peerFrames(args[1])
	case len(args) == 2 && args[0] == "drain":
		return peerDrain(args[1])
	}
	return errors.New("peer server, client ADDRESS, frames COUNT or drain BYTES")
}

// peerFrames writes so many frames to its output once its input has ended.
func peerFrames(count string) error {
	n, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return err
	}
	for line := update(frameSize); n > 0; n-- {
		if _, err := os.Stdout.Write(line); err != nil {
			return err
		}
	}
	return nil
}

// peerDrain says a number when it begins to read its input, and another when it has so many bytes.
func peerDrain(size string) error {
	left, err := strconv.Atoi(size)
	if err != nil {
		return err
	}
	fmt.Fprintln(os.Stdout, 0)
	for block := make([]byte, 64<<10); left > 0; {
		n, err := os.Stdin.Read(block[:min(left, len(block))])
		if left -= n; err != nil && left > 0 {
			return fmt.Errorf("%d bytes are missing: %w", left, err)
		}
	}
	fmt.Fprintln(os.Stdout, 0)
	return nil
}

// peerServer says its port. A line of a connection says what it sends: so many bytes ("s BYTES"),
// those without pacing, as a host does that is not set to BBR ("u BYTES"), or the line itself.
func peerServer() error {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp4", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Fprintln(os.Stdout, l.Addr().(*net.TCPAddr).Port)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				peerServe(c)
			}()
		}
	}()
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

func peerServe(c net.Conn) {
	r := bufio.NewReaderSize(c, 64)
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return
		}
		word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		if word == "u" {
			if err := unpaced(c); err != nil {
				return
			}
		} else if word != "s" {
			if _, err := io.WriteString(c, line); err != nil {
				return
			}
			continue
		}
		left, err := strconv.ParseInt(rest, 10, 64)
		if err != nil {
			return
		}
		for block := make([]byte, peerBlock); left > 0; {
			n, err := c.Write(block[:min(left, peerBlock)])
			if err != nil {
				return
			}
			left -= int64(n)
		}
	}
}

// peerClient does what each line of its input says, and says how long it took.
func peerClient(addr string) error {
	dial, err := peerDialer(addr)
	if err != nil {
		return err
	}
	var held []net.Conn
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		var word string
		var n int
		var size int64
		if _, err := fmt.Sscanf(in.Text(), "stream %s %d %d", &word, &n, &size); err == nil {
			took, err := peerStreams(dial, word, n, size)
			if err != nil {
				return err
			}
			fmt.Fprintln(os.Stdout, took.Nanoseconds())
		} else if _, err := fmt.Sscanf(in.Text(), "connect %d", &n); err == nil {
			p50, err := peerConnects(dial, n)
			if err != nil {
				return err
			}
			fmt.Fprintln(os.Stdout, p50.Nanoseconds())
		} else if _, err := fmt.Sscanf(in.Text(), "short %d %d", &n, &size); err == nil {
			took, err := peerShort(dial, n, int(size))
			if err != nil {
				return err
			}
			fmt.Fprintln(os.Stdout, took.Nanoseconds())
		} else if _, err := fmt.Sscanf(in.Text(), "hold %d", &n); err == nil {
			began := time.Now()
			for range n {
				c, err := dial()
				if err != nil {
					return err
				}
				if err := peerEcho(c); err != nil {
					return err
				}
				held = append(held, c)
			}
			fmt.Fprintln(os.Stdout, time.Since(began).Nanoseconds())
		} else if in.Text() == "rest" {
			fmt.Fprintln(os.Stdout, 0)
		} else {
			return fmt.Errorf("%q", in.Text())
		}
	}
	for _, c := range held {
		c.Close()
	}
	return nil
}

// peerDialer connects to addr, through the HTTP proxy of the environment if there is one.
func peerDialer(addr string) (func() (net.Conn, error), error) {
	var d net.Dialer
	// One lookup: what names cost is measured by itself.
	if host, port, err := net.SplitHostPort(addr); err == nil && os.Getenv("HTTPS_PROXY") == "" {
		all, err := net.DefaultResolver.LookupHost(context.Background(), host)
		if err != nil {
			return nil, err
		}
		addr = net.JoinHostPort(all[0], port)
	}
	proxy := os.Getenv("HTTPS_PROXY")
	if proxy == "" {
		return func() (net.Conn, error) { return d.DialContext(context.Background(), "tcp", addr) }, nil
	}
	u, err := url.Parse(proxy)
	if err != nil {
		return nil, err
	}
	login := ""
	if u.User != nil {
		login = "Proxy-Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte(u.User.String())) + "\r\n"
	}
	return func() (net.Conn, error) {
		c, err := d.DialContext(context.Background(), "tcp", u.Host)
		if err != nil {
			return nil, err
		}
		if _, err := fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n%s\r\n", addr, addr, login); err != nil {
			return nil, err
		}
		// Byte by byte: what follows the answer is not ours.
		var answer []byte
		for one := make([]byte, 1); !strings.HasSuffix(string(answer), "\r\n\r\n"); answer = append(answer, one...) {
			if _, err := c.Read(one); err != nil {
				return nil, fmt.Errorf("the proxy's answer: %w: %s", err, answer)
			}
		}
		if !strings.Contains(string(answer[:min(len(answer), 15)]), " 200") {
			return nil, fmt.Errorf("the proxy says %q", answer)
		}
		return c, nil
	}, nil
}

const frameSize = 4 << 10

// update is a frame of that size in bytes, with its newline.
func update(size int) []byte {
	head := `{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s","update":{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"`
	return []byte(head + strings.Repeat("x", size-len(head)-6) + "\"}}}}\n")
}

// peerStreams downloads size bytes over n connections, and says how long that took without
// setting them up. word is what the server is told.
func peerStreams(dial func() (net.Conn, error), word string, n int, size int64) (time.Duration, error) {
	conns := make([]net.Conn, n)
	for i := range conns {
		c, err := dial()
		if err != nil {
			return 0, err
		}
		defer c.Close()
		if conns[i] = c; peerEcho(c) != nil {
			return 0, errors.New("no echo")
		}
	}
	errs := make([]error, n)
	began := time.Now()
	var all sync.WaitGroup
	for i, c := range conns {
		all.Go(func() {
			left := size / int64(n)
			if _, errs[i] = fmt.Fprintf(c, "%s %d\n", word, left); errs[i] != nil {
				return
			}
			for block := make([]byte, peerBlock); left > 0; {
				m, err := c.Read(block[:min(left, peerBlock)])
				if left -= int64(m); err != nil && left > 0 {
					errs[i] = fmt.Errorf("%d bytes are missing: %w", left, err)
					return
				}
			}
		})
	}
	all.Wait()
	return time.Since(began), errors.Join(errs...)
}

func peerEcho(c net.Conn) error {
	if _, err := io.WriteString(c, "ping\n"); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 5))
	return err
}

// peerConnects is the median of n connections, one after the other, each to its first
// answer: behind a gateway connecting alone says nothing.
func peerConnects(dial func() (net.Conn, error), n int) (time.Duration, error) {
	all := make([]time.Duration, n)
	for i := range all {
		began := time.Now()
		c, err := dial()
		if err != nil {
			return 0, err
		}
		if err := peerEcho(c); err != nil {
			return 0, err
		}
		all[i] = time.Since(began)
		c.Close()
	}
	slices.Sort(all)
	return all[n/2], nil
}

// peerShort makes n connections with an answer each, some at once.
func peerShort(dial func() (net.Conn, error), n, atOnce int) (time.Duration, error) {
	began := time.Now()
	errs := make([]error, atOnce)
	var all sync.WaitGroup
	for i := range atOnce {
		all.Go(func() {
			for range n / atOnce {
				c, err := dial()
				if err == nil {
					err = peerEcho(c)
					c.Close()
				}
				if err != nil {
					errs[i] = err
					return
				}
			}
		})
	}
	all.Wait()
	return time.Since(began), errors.Join(errs...)
}
