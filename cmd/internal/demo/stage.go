package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"agentconnect.md/sandbox/cmd/internal/selftest"
)

// stage is what the demo sets up around the agent. Its owner calls strike in the end.
type stage struct {
	bin, home, base, root string
	env                   []string

	daemon  *exec.Cmd
	ended   chan error // the daemon's end, once
	undo    []func() error
	serving sync.WaitGroup
}

func (s *stage) workspace(id string) string {
	return filepath.Join(s.root, "agents", id, "workspace")
}

// shared is a folder that the agent may read.
func (s *stage) shared() string { return filepath.Join(s.base, "shared") }

// sealed is a folder that the agent may read, two levels inside one that it may write.
func (s *stage) sealed() string { return filepath.Join(s.base, "data", "sub", "sealed") }

// planted is where an agent has repositories whose control files are attacked.
func (s *stage) planted(id string) string { return filepath.Join(s.workspace(id), "planted") }

// startDaemon starts the daemon and waits until it answers.
func (s *stage) startDaemon(ctx context.Context) error {
	logName := filepath.Join(s.base, "daemon.log")
	log, err := os.OpenFile(logName, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("daemon log: %w", err)
	}
	defer log.Close()
	// Not bound to ctx: the daemon is stopped in order, by strike.
	s.daemon = exec.CommandContext(context.WithoutCancel(ctx), filepath.Join(s.bin, "agentconnect"), "run", "--supervisor", "direct")
	s.daemon.Env = append(s.env, "AWS_SECRET_ACCESS_KEY=not-for-agents")
	s.daemon.Dir = s.home
	s.daemon.Stdout, s.daemon.Stderr = log, log
	// An interrupt of the terminal is for the demo, which then stops the daemon.
	s.daemon.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := s.daemon.Start(); err != nil {
		s.daemon = nil
		return fmt.Errorf("the daemon: %w", err)
	}
	s.ended = make(chan error, 1)
	go func() { s.ended <- s.daemon.Wait() }()

	logged := func() string { text, _ := os.ReadFile(logName); return "its log: " + string(bytes.TrimSpace(text)) }
	deadline := time.NewTimer(30 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if s.answers(ctx) {
			return nil
		}
		select {
		case err := <-s.ended:
			s.daemon = nil
			return errors.Join(errors.New("the daemon ended at once"), err, errors.New(logged()))
		case <-deadline.C:
			return fmt.Errorf("the daemon does not answer after 30 s\n%s", logged())
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// answers asks the daemon's own socket, in the one place where this ROOT has it.
func (s *stage) answers(ctx context.Context) bool {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", filepath.Join(s.root, "run", "control.sock"))
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// canary writes a file that holds the token, and remembers to remove it.
func (s *stage) canary(path, token string) (string, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return "", err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return "", err
	}
	s.undo = append(s.undo, func() error { return os.Remove(path) })
	_, err = io.WriteString(f, token+"\n")
	return path, errors.Join(err, f.Close())
}

// listen accepts and greets whoever comes, until strike.
func (s *stage) listen(ctx context.Context, network, address, greeting string) (string, error) {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, network, address)
	if err != nil {
		return "", err
	}
	s.undo = append(s.undo, listener.Close)
	s.serving.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return // closed by strike
			}
			_, _ = io.WriteString(conn, greeting+"\n") // a visitor may be gone at once
			conn.Close()
		}
	})
	return listener.Addr().String(), nil
}

// answerUDP answers every datagram, until strike.
func (s *stage) answerUDP(ctx context.Context, greeting string) (string, error) {
	var config net.ListenConfig
	conn, err := config.ListenPacket(ctx, "udp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	s.undo = append(s.undo, conn.Close)
	s.serving.Go(func() {
		buffer := make([]byte, 512)
		for {
			_, from, err := conn.ReadFrom(buffer)
			if err != nil {
				return // closed by strike
			}
			_, _ = conn.WriteTo([]byte(greeting), from) // like any datagram, it may get lost
		}
	})
	return conn.LocalAddr().String(), nil
}

// bystander starts a process of the same user that has no part in the demo but to be there,
// with a secret in its environment, the file open, and its folder as working directory.
func (s *stage) bystander(ctx context.Context, secret, file string) (int, error) {
	open, err := os.Open(file)
	if err != nil {
		return 0, err
	}
	defer open.Close()
	cmd := exec.CommandContext(context.WithoutCancel(ctx), "sleep", "600")
	cmd.Env, cmd.Dir, cmd.Stdin = []string{"SOME_TOKEN=" + secret}, filepath.Dir(file), open
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	s.undo = append(s.undo, func() error {
		cmd.Process.Kill()
		_ = cmd.Wait() // says "killed"
		return nil
	})
	return cmd.Process.Pid, nil
}

// set plants what the agent will try to reach.
func (s *stage) set(ctx context.Context) (*selftest.Targets, error) {
	token := "canary-" + rand.Text()
	tag := rand.Text()[:8]
	t := &selftest.Targets{
		Token: token, Root: s.root, Workspace: s.workspace(agent), Network: "none",
		Memory:         filepath.Join(s.root, "agents", agent, "memory"),
		AgentJSON:      filepath.Join(s.root, "agents", agent, "agent.json"),
		AbstractSocket: "agentconnect-demo-" + tag,
		Secrets:        []string{"not-for-agents"},
		UID:            os.Getuid(),
		Pinned:         []string{filepath.Dir(s.sealed())},
	}
	link := filepath.Join(t.Workspace, "link-to-home")
	steps := []struct {
		what string
		do   func() error
	}{
		{"file in the home", func() (err error) {
			t.HomeCanary, err = s.canary(filepath.Join(s.home, ".agentconnect-demo-canary-"+tag), token)
			return err
		}},
		{"file in ROOT", func() (err error) {
			t.RootCanary, err = s.canary(filepath.Join(s.root, "canary-"+tag), token)
			return err
		}},
		{"file of another agent", func() (err error) {
			t.OtherAgent, err = s.canary(filepath.Join(s.workspace(neighbour), "canary-"+tag), token)
			return err
		}},
		{"file in /tmp", func() (err error) {
			t.TmpCanary, err = s.canary(filepath.Join("/tmp", "agentconnect-demo-canary-"+tag), token)
			return err
		}},
		{"link in the workspace", func() error {
			t.Link = link
			s.undo = append(s.undo, func() error { return os.Remove(link) })
			return os.Symlink(t.HomeCanary, link)
		}},
		{"sockets of the session", func() error {
			t.Sockets = map[string]string{}
			for _, name := range []string{"bus", "systemd-private", "system-bus", "ssh-agent", "gpg-agent", "docker", "wayland"} {
				path := filepath.Join(s.base, name+".sock")
				t.Sockets[name] = path
				if _, err := s.listen(ctx, "unix", path, token); err != nil {
					return err
				}
			}
			return nil
		}},
		{"socket in a readable folder", func() (err error) {
			t.ExposedSocket, err = s.listen(ctx, "unix", filepath.Join(s.shared(), "s"), token)
			return err
		}},
		{"socket in the workspace", func() (err error) {
			t.WorkspaceSocket, err = s.listen(ctx, "unix", filepath.Join(t.Workspace, "s"), token)
			return err
		}},
		{"abstract socket", func() error { _, err := s.listen(ctx, "unix", "@"+t.AbstractSocket, token); return err }},
		{"TCP listener", func() (err error) { t.HostTCP, err = s.listen(ctx, "tcp", "127.0.0.1:0", token); return err }},
		{"UDP listener", func() (err error) { t.HostUDP, err = s.answerUDP(ctx, token); return err }},
		{"process to signal", func() (err error) {
			t.HostSecret = "secret-" + token
			t.HostPID, err = s.bystander(ctx, t.HostSecret, t.HomeCanary)
			return err
		}},
		{"folder beside the workspace", func() (err error) {
			t.Sibling, err = s.canary(filepath.Join(t.Workspace+"-beside", "canary"), token)
			return err
		}},
		{"file in /dev/shm", func() (err error) {
			t.ShmCanary, err = s.canary(filepath.Join("/dev/shm", "agentconnect-demo-"+tag), token)
			return err
		}},
		{"git repositories", func() error {
			t.Git = s.planted(agent)
			for _, id := range []string{agent, nested} {
				s.undo = append(s.undo, func() error { return os.RemoveAll(s.planted(id)) })
				if err := selftest.PlantGit(s.planted(id)); err != nil {
					return err
				}
			}
			return nil
		}},
		{"System V objects", func() error {
			key, remove, err := selftest.PlantIPC()
			if err == nil {
				t.IPCKey = key
				s.undo = append(s.undo, remove)
			}
			return err
		}},
	}
	for _, step := range steps {
		if err := step.do(); err != nil {
			return nil, fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return t, nil
}

// strike ends what was started and removes what was planted, the last first.
func (s *stage) strike() error {
	var errs []error
	if s.daemon != nil {
		s.daemon.Process.Signal(syscall.SIGTERM)
		grace := time.NewTimer(30 * time.Second)
		defer grace.Stop()
		select {
		case err := <-s.ended:
			if err != nil {
				errs = append(errs, fmt.Errorf("the daemon's end: %w", err))
			}
		case <-grace.C:
			s.daemon.Process.Kill()
			errs = append(errs, errors.New("the daemon did not end within 30 s of SIGTERM and was killed"), <-s.ended)
		}
	}
	for i := len(s.undo) - 1; i >= 0; i-- {
		if err := s.undo[i](); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	s.serving.Wait()
	return errors.Join(errs...)
}
