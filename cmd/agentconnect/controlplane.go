// The control plane on the command line: where it is, the key, and how the connection is.

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
	"unsafe"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"agentconnect.md/sandbox/cmd/internal/config"
	"agentconnect.md/sandbox/cmd/internal/control"
	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
)

// maxKey bounds a key read from stdin, bytes.
const maxKey = 4096

func (a *app) loginCommand() *cobra.Command {
	var address string
	var insecure bool
	c := &cobra.Command{
		Use: "login", Short: "keep the control plane's address and key (the key comes on stdin)",
		Long: `Keeps the address of an AgentConnect control plane and this daemon's key in
ROOT/config.json, readable for you alone. The key is asked for on a terminal and is
read from stdin otherwise, so that it stands on no command line.`,
		Args: a.args(0, 0),
		RunE: func(c *cobra.Command, _ []string) error {
			s, err := a.site()
			if err != nil {
				return err
			}
			if address == "" {
				address = s.cfg.ControlPlane.URL
			}
			if address == "" {
				return &usageError{text: "login: no address; give --api-url URL", see: c.CommandPath()}
			}
			insecure = insecure || s.cfg.ControlPlane.AllowInsecure
			if _, err := cp.Endpoint(address, insecure); err != nil {
				return err
			}
			key, err := a.readKey()
			if err != nil {
				return err
			}
			for _, v := range []struct {
				key   string
				value any
			}{{"controlPlane.url", address}, {"controlPlane.key", key}, {"controlPlane.allowInsecure", insecure}} {
				if v.key == "controlPlane.allowInsecure" && !insecure {
					continue
				}
				if err := config.Set(s.cfg.Root, v.key, v.value); err != nil {
					return err
				}
			}
			next := "start the daemon with `agentconnect up`"
			now, err := a.config()
			if err != nil {
				return err
			}
			switch {
			case !now.ControlPlane.Enabled:
				next = "nothing connects, since controlPlane.enabled is false (`agentconnect config` says where)"
			case s.client().Reload(c.Context()) == nil:
				next = "the daemon connects; see `agentconnect status`"
			}
			return a.say(map[string]any{"url": address}, "kept in %s/config.json; %s", s.cfg.Root, next)
		},
	}
	c.Flags().StringVar(&address, "api-url", "", "address of the control plane, wss://HOST")
	c.Flags().BoolVar(&insecure, "allow-insecure", false, "permit an address without TLS that is not this machine")
	return c
}

// readKey asks for the key on a terminal, without showing it, or reads it from stdin.
func (a *app) readKey() (string, error) {
	var text string
	if f, ok := a.in.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		fmt.Fprint(a.err, "key: ")
		raw, err := term.ReadPassword(int(f.Fd()))
		fmt.Fprintln(a.err)
		if err != nil {
			return "", err
		}
		text = string(raw)
	} else {
		line, err := bufio.NewReader(io.LimitReader(a.in, maxKey+1)).ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return "", err
		}
		text = line
	}
	text = strings.TrimSpace(text)
	switch {
	case text == "":
		return "", errors.New("no key on stdin; for example: agentconnect login --api-url wss://HOST < key.txt")
	case len(text) > maxKey || strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r >= 0x7f }):
		return "", errors.New("that is no key: one word of printable characters is expected")
	}
	return text, nil
}

// connectFlags are the flags of `run` that say where to connect.
func (a *app) connectFlags(c *cobra.Command) func() []config.Flag {
	var address, key string
	var insecure bool
	c.Flags().StringVar(&address, "api-url", "", "connect to the AgentConnect control plane at URL (wss://HOST)")
	c.Flags().StringVar(&key, "api-key", "", "this daemon's key there; better kept with `agentconnect login`, or in AGENTCONNECT_API_KEY")
	c.Flags().BoolVar(&insecure, "allow-insecure", false, "permit an --api-url without TLS that is not this machine")
	return func() []config.Flag {
		var flags []config.Flag
		if c.Flags().Changed("api-url") {
			flags = append(flags, config.Flag{Name: "api-url", Key: "controlPlane.url", Value: address})
		}
		if c.Flags().Changed("api-key") {
			own := strings.Clone(key)
			hideArgument(own)
			flags = append(flags, config.Flag{Name: "api-key", Key: "controlPlane.key", Value: own})
		}
		if insecure {
			flags = append(flags, config.Flag{Name: "allow-insecure", Key: "controlPlane.allowInsecure", Value: "true"})
		}
		return flags
	}
}

// hideArgument overwrites a value in this process's own command line, which everybody on
// the machine can read in /proc. The strings of os.Args are that memory itself.
func hideArgument(value string) {
	if value == "" {
		return
	}
	for _, arg := range os.Args[1:] {
		if i := strings.Index(arg, value); i >= 0 {
			b := unsafe.Slice(unsafe.StringData(arg), len(arg))
			for j := i; j < i+len(value); j++ {
				b[j] = '*'
			}
		}
	}
}

// connectionLine is the connection in one line.
func connectionLine(c *control.ControlPlane) string {
	line := fmt.Sprintf("%s %s", c.State, c.URL)
	if !c.Since.IsZero() {
		line += ", since " + when(c.Since)
	}
	if c.LastError != "" {
		line += ": " + c.LastError
	}
	if !c.NextTry.IsZero() {
		line += fmt.Sprintf("; next try %s", c.NextTry.Local().Format(time.TimeOnly))
	}
	if c.Waiting > 0 {
		line += fmt.Sprintf("; %d reports wait", c.Waiting)
	}
	return line
}
