package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"syscall"
	"time"

	"agentconnect.md/sandbox/cmd/internal/peer"
)

// ErrNotRunning: nobody listens on the control socket.
var ErrNotRunning = errors.New("the daemon is not running; " + HowToStart)

// HowToStart is the remedy: as a unit, whose agents are units, too, or by hand.
const HowToStart = "start it with `agentconnect up`, or `agentconnect run` where there is no user manager"

// maxAnswer bounds an answer of the daemon, bytes.
const maxAnswer = 16 << 20

// DialAgent connects to a Unix socket of ours and refuses one that another user
// listens on: a directory taken over while we were away must not get our requests.
func DialAgent(ctx context.Context, path string) (*net.UnixConn, error) {
	return dial(ctx, path, os.Getuid())
}

func dial(ctx context.Context, path string, uid int) (*net.UnixConn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	uc := c.(*net.UnixConn)
	got, err := peer.UID(uc)
	if err == nil && got != uid {
		err = fmt.Errorf("%s: user %d listens there, not user %d; remove the socket and start the daemon again", path, got, uid)
	}
	if err != nil {
		uc.Close()
		return nil, err
	}
	return uc, nil
}

// Client talks to the daemon on the control socket. It keeps no connection between
// calls. Its errors are ErrNotRunning, an *Error that the daemon answered, or one of
// the transport.
type Client struct {
	socket string
	http   *http.Client
}

// NewClient returns a client for the socket at path. It does not connect yet.
func NewClient(path string) *Client {
	return &Client{socket: path, http: &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return DialAgent(ctx, path)
		},
	}}}
}

// Status asks for the whole picture. It waits at most 10 s: status is what people
// type when the daemon hangs.
func (c *Client) Status(ctx context.Context) (*Status, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return call[Status](ctx, c, http.MethodGet, "/v1/status")
}

// Probe runs the probe in the daemon, which acts on its result.
func (c *Client) Probe(ctx context.Context) (*Probe, error) {
	return call[Probe](ctx, c, http.MethodPost, "/v1/probe")
}

// Reload makes the daemon read its configuration again and answers what is wrong with it.
func (c *Client) Reload(ctx context.Context) error {
	_, err := call[struct{}](ctx, c, http.MethodPost, "/v1/reload")
	return err
}

// Shutdown ends the daemon and what it runs directly; it returns when they have ended.
func (c *Client) Shutdown(ctx context.Context) error {
	_, err := call[struct{}](ctx, c, http.MethodPost, "/v1/shutdown")
	return err
}

// Agent asks for one agent.
func (c *Client) Agent(ctx context.Context, id string) (*AgentStatus, error) {
	return call[AgentStatus](ctx, c, http.MethodGet, "/v1/agents/"+url.PathEscape(id))
}

// Placed asks for the configuration of an agent that a control plane placed, which only the
// daemon has. It holds no secret.
func (c *Client) Placed(ctx context.Context, id string) (json.RawMessage, error) {
	raw, err := call[json.RawMessage](ctx, c, http.MethodGet, "/v1/agents/"+url.PathEscape(id)+"/placed")
	if err != nil {
		return nil, err
	}
	return *raw, nil
}

// Start, Stop and Restart return when the wish took effect.
func (c *Client) Start(ctx context.Context, id string) (*AgentStatus, error) {
	return c.agentCall(ctx, id, "start")
}

// Stop ends the agent; it stays stopped until somebody starts it.
func (c *Client) Stop(ctx context.Context, id string) (*AgentStatus, error) {
	return c.agentCall(ctx, id, "stop")
}

// Restart stops the agent if it runs and starts it.
func (c *Client) Restart(ctx context.Context, id string) (*AgentStatus, error) {
	return c.agentCall(ctx, id, "restart")
}

func (c *Client) agentCall(ctx context.Context, id, verb string) (*AgentStatus, error) {
	return call[AgentStatus](ctx, c, http.MethodPost, "/v1/agents/"+url.PathEscape(id)+"/"+verb)
}

// Attach starts the agent if needed and names its socket.
func (c *Client) Attach(ctx context.Context, id string) (*Attach, error) {
	return call[Attach](ctx, c, http.MethodPost, "/v1/agents/"+url.PathEscape(id)+"/attach")
}

// Exec names a socket that serves exec for the agent; it starts no runtime.
func (c *Client) Exec(ctx context.Context, id string) (*Attach, error) {
	return call[Attach](ctx, c, http.MethodPost, "/v1/agents/"+url.PathEscape(id)+"/exec")
}

// Egress says a word about the network of a running agent.
func (c *Client) Egress(ctx context.Context, id string, w Egress) error {
	body, err := json.Marshal(w)
	if err != nil {
		return err
	}
	_, err = send[struct{}](ctx, c, http.MethodPost, "/v1/agents/"+url.PathEscape(id)+"/egress", bytes.NewReader(body))
	return err
}

func call[T any](ctx context.Context, c *Client, method, path string) (*T, error) {
	return send[T](ctx, c, method, path, nil)
}

func send[T any](ctx context.Context, c *Client, method, path string, content io.Reader) (*T, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://agentconnect"+path, content)
	if err != nil {
		return nil, err
	}
	res, err := c.http.Do(req)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
			return nil, ErrNotRunning
		}
		var ue *url.Error // its text repeats the method and an address that is none
		if errors.As(err, &ue) {
			err = ue.Err
		}
		return nil, fmt.Errorf("control socket %s: %w", c.socket, err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer+1))
	if err != nil {
		return nil, fmt.Errorf("control socket %s: %w", c.socket, err)
	}
	if len(body) > maxAnswer {
		return nil, fmt.Errorf("control socket %s: answer above %d bytes", c.socket, maxAnswer)
	}
	if res.StatusCode/100 != 2 {
		e := &Error{}
		if err := json.Unmarshal(body, e); err != nil || e.Message == "" {
			return nil, fmt.Errorf("control socket %s: answered %s; is the daemon of the same version?", c.socket, res.Status)
		}
		if e.Code == 0 {
			e.Code = 1
		}
		return nil, e
	}
	v := new(T)
	if err := json.NewDecoder(bytes.NewReader(body)).Decode(v); err != nil {
		return nil, fmt.Errorf("control socket %s: answer of %s: %w", c.socket, path, err)
	}
	return v, nil
}
