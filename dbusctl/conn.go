// The connection: opened, lost, opened again.
package dbusctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/godbus/dbus/v5"

	"agentconnect.md/sandbox/units"
)

const (
	systemd    = "org.freedesktop.systemd1"
	manager    = systemd + ".Manager"
	properties = "org.freedesktop.DBus.Properties"
	bus        = "org.freedesktop.DBus"

	managerPath = dbus.ObjectPath("/org/freedesktop/systemd1")
	unitPath    = dbus.ObjectPath("/org/freedesktop/systemd1/unit/")

	// callTimeout bounds one answer of the bus or the manager where the caller set no deadline.
	callTimeout = 30 * time.Second
	// ownerTimeout is how long a manager may take to come to a bus that is there.
	ownerTimeout = 5 * time.Second
	// A lost bus is tried again after growing delays.
	firstDelay, lastDelay = 20 * time.Millisecond, 5 * time.Second
)

// Conn is a connection to a user's manager. When the bus or the manager restarts, it connects
// again by itself; subscribers are told to look again, jobs that were waited for are looked up,
// and calls wait a little. Its methods can be called at the same time.
type Conn struct {
	place Place
	log   *slog.Logger

	life   context.Context
	cancel context.CancelFunc
	loop   sync.WaitGroup

	mu      sync.Mutex
	current *session      // nil while there is none
	ready   chan struct{} // closed while current is there and has an owner
	isReady bool
	age     uint64 // grows each time ready is reached
	lastErr error  // of the last try to connect
	version units.Version
	jobs    map[*job]struct{}
	watches map[*watch]struct{}

	known known
}

// session is one connection to one bus.
type session struct {
	bus     *dbus.Conn
	signals chan *dbus.Signal
	owner   string // the manager's unique name; Conn.mu
	version units.Version
}

// Connect connects to the manager of the place's user. The context bounds the connecting, not
// the connection. Errors are an *EnvironmentError where there is nothing to connect to.
func Connect(ctx context.Context, place Place, log *slog.Logger) (*Conn, error) {
	if err := place.Check(); err != nil {
		return nil, err
	}
	c := &Conn{
		place: place, log: log,
		ready: make(chan struct{}),
		jobs:  map[*job]struct{}{}, watches: map[*watch]struct{}{},
		known: known{units: map[dbus.ObjectPath]*knownUnit{}},
	}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	c.life, c.cancel = context.WithCancel(context.Background())
	s, err := c.open(ctx)
	if err != nil {
		c.cancel()
		return nil, err
	}
	c.install(s)
	c.loop.Go(c.run)
	return c, nil
}

// Close ends the connection and everything that waits for it, and returns when nothing of it
// runs any more. Jobs go on without us.
func (c *Conn) Close() {
	c.mu.Lock()
	c.cancel()
	s := c.current
	c.mu.Unlock()
	if s != nil {
		_ = s.bus.Close() // what it did not send, nobody waits for
	}
	c.loop.Wait()
}

// Version is the manager's, as of the last connecting.
func (c *Conn) Version() units.Version {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.version
}

// Connected reports whether the manager could be asked right now.
func (c *Conn) Connected() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.isReady
}

// open makes a session whose manager is there.
func (c *Conn) open(ctx context.Context) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	// The library has no deadline for its handshake: its context, once over, closes the socket.
	life, end := context.WithCancel(c.life)
	abandon := context.AfterFunc(ctx, end)
	s, err := c.handshake(ctx, life)
	if !abandon() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		end()
		if s != nil {
			_ = s.bus.Close() // what it did not send, nobody waits for
		}
		var known *EnvironmentError
		if errors.As(err, &known) || c.life.Err() != nil {
			return nil, err
		}
		if ctx.Err() != nil && !errors.Is(err, ctx.Err()) {
			err = fmt.Errorf("%w: %w", ctx.Err(), err)
		}
		return nil, &EnvironmentError{
			Kind: ErrNoBus, What: c.place.Bus(), Cause: err,
			Remedy: "run: systemctl --user reset-failed dbus.socket dbus.service; systemctl --user start dbus.socket",
		}
	}
	// From here on only Close and a broken socket end it; end is called by the library's own
	// context then.
	context.AfterFunc(s.bus.Context(), end)
	return s, nil
}

// handshake returns a session together with an error where it is there to be closed.
func (c *Conn) handshake(ctx, life context.Context) (*session, error) {
	s := &session{signals: make(chan *dbus.Signal)}
	handler := &heeding{dbus.NewSequentialSignalHandler(), func(signal *dbus.Signal) { c.known.heard(s, signal) }}
	conn, err := dial(ctx, c.place.Bus(), dbus.WithContext(life), dbus.WithSignalHandler(handler))
	if err != nil {
		return nil, err
	}
	s.bus = conn
	conn.Signal(s.signals)
	// EXTERNAL, by number: a login name would need a look-up.
	if err := conn.Auth([]dbus.Auth{dbus.AuthExternal(strconv.Itoa(os.Geteuid()))}); err != nil {
		return s, err
	}
	if err := conn.Hello(); err != nil {
		return s, err
	}
	if err := s.addMatch(ctx, ownerRule); err != nil {
		return s, err
	}
	if err := c.waitOwner(ctx, s); err != nil {
		return s, err
	}
	var text dbus.Variant
	if err := s.bus.Object(systemd, managerPath).CallWithContext(ctx, properties+".Get", dbus.FlagNoAutoStart, manager, "Version").Store(&text); err != nil {
		return s, err
	}
	word, _ := text.Value().(string)
	s.version, err = units.ParseVersion(word)
	return s, err
}

// waitOwner waits for the manager to be on the bus. A bus that our own connecting started is
// there before the manager has noticed.
func (c *Conn) waitOwner(ctx context.Context, s *session) error {
	ctx, cancel := context.WithTimeout(ctx, ownerTimeout)
	defer cancel()
	err := s.bus.BusObject().CallWithContext(ctx, bus+".GetNameOwner", 0, systemd).Store(&s.owner)
	var answer dbus.Error
	if err == nil || !errors.As(err, &answer) {
		return err
	}
	for {
		select {
		case signal, ok := <-s.signals:
			if !ok {
				return io.ErrUnexpectedEOF
			}
			if owner, ok := newOwner(signal); ok && owner != "" {
				s.owner = owner
				return nil
			}
		case <-ctx.Done():
			return &EnvironmentError{
				Kind: ErrNoUserManager, What: "it is not on the bus at " + c.place.Bus(),
				Remedy: fmt.Sprintf("see: systemctl status user@%d.service", c.place.UID),
			}
		}
	}
}

// install makes s the current session: what waits and watches is put onto it.
func (c *Conn) install(s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.current, c.lastErr, c.version = s, nil, s.version
	for j := range c.jobs {
		j.on = s
		s.send("AddMatch", j.rule())
	}
	for w := range c.watches {
		w.on = s
		for _, rule := range w.rules() {
			s.send("AddMatch", rule)
		}
	}
	c.reached()
}

// reached says to everyone that the manager can be asked; c.mu is held.
func (c *Conn) reached() {
	// Jobs, too: the manager says their end to those who made them, and it has forgotten them
	// with the connection.
	if len(c.watches) > 0 || len(c.jobs) > 0 {
		c.current.bus.Object(systemd, managerPath).Go(manager+".Subscribe", dbus.FlagNoReplyExpected|dbus.FlagNoAutoStart, nil)
	}
	c.known.begin(c.current, c.current.owner)
	c.age++
	c.isReady = true
	close(c.ready)
	for j := range c.jobs {
		j.lookAgain()
	}
	for w := range c.watches {
		w.post(Change{Look: true})
	}
}

// unreached makes callers wait; c.mu is held.
func (c *Conn) unreached() {
	if c.isReady {
		c.isReady = false
		c.ready = make(chan struct{})
	}
}

// run owns the sessions: it reads each one's signals until the bus goes away, and opens the
// next.
func (c *Conn) run() {
	defer func() {
		c.mu.Lock()
		c.current = nil
		c.unreached()
		c.mu.Unlock()
	}()
	for {
		c.mu.Lock()
		s := c.current
		c.mu.Unlock()
		for signal := range s.signals {
			c.handle(s, signal)
		}
		c.mu.Lock()
		c.current = nil
		c.unreached()
		c.mu.Unlock()
		if c.life.Err() != nil {
			return
		}
		c.log.Info("the user bus went away; connecting again", "bus", c.place.Bus())
		if s = c.reopen(); s == nil {
			return
		}
		c.install(s)
		c.log.Info("connected to the user manager again", "version", int(s.version))
	}
}

// reopen tries until it works or the Conn is closed.
func (c *Conn) reopen() *session {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for delay := firstDelay; ; delay = min(2*delay, lastDelay) {
		select {
		case <-c.life.Done():
			return nil
		case <-timer.C:
		}
		s, err := c.open(c.life)
		if err == nil {
			return s
		}
		c.mu.Lock()
		c.lastErr = err
		c.mu.Unlock()
		c.log.Debug("no user bus yet", "error", err)
		timer.Reset(delay)
	}
}

// handle takes one signal. Only the manager's own word counts: everyone on the bus can send a
// signal of any name.
func (c *Conn) handle(s *session, signal *dbus.Signal) {
	if owner, ok := newOwner(signal); ok {
		c.mu.Lock()
		s.owner = owner
		c.unreached()
		if owner != "" {
			c.reached()
		}
		c.mu.Unlock()
		return
	}
	if signal.Sender != s.owner {
		return
	}
	switch signal.Name {
	case manager + ".JobRemoved":
		var id uint32
		var path dbus.ObjectPath
		var unit, result string
		if dbus.Store(signal.Body, &id, &path, &unit, &result) == nil {
			c.mu.Lock()
			for j := range c.jobs {
				if j.unit == unit {
					j.removed(path, result)
				}
			}
			c.mu.Unlock()
		}
	default:
		c.mu.Lock()
		for w := range c.watches {
			w.signal(signal)
		}
		c.mu.Unlock()
	}
}

// session waits for the manager to be there, newer than the given age, and calls use under the
// lock, so that what use registers is on this session or moved to the next one.
func (c *Conn) session(ctx context.Context, newer uint64, use func(*session)) (*session, uint64, error) {
	for {
		c.mu.Lock()
		if c.life.Err() != nil {
			c.mu.Unlock()
			return nil, 0, ErrClosed
		}
		if c.isReady && c.age > newer {
			if use != nil {
				use(c.current)
			}
			s, age := c.current, c.age
			c.mu.Unlock()
			return s, age, nil
		}
		ready := c.ready
		if c.isReady {
			// The signal that says it is gone has yet to be handled: its channel is the next one.
			ready = nil
		}
		c.mu.Unlock()
		if ready == nil {
			if err := c.pause(ctx); err != nil {
				return nil, 0, err
			}
			continue
		}
		select {
		case <-ready:
		case <-c.life.Done():
		case <-ctx.Done():
			return nil, 0, c.gone(ctx.Err())
		}
	}
}

// pause gives the loop a moment; only where a call failed before the signal of why was handled.
func (c *Conn) pause(ctx context.Context) error {
	timer := time.NewTimer(firstDelay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-c.life.Done():
		return ErrClosed
	case <-ctx.Done():
		return c.gone(ctx.Err())
	}
}

func (c *Conn) gone(why error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lastErr != nil {
		return fmt.Errorf("%w: %w: %w", ErrBusGone, why, c.lastErr)
	}
	return fmt.Errorf("%w: %w", ErrBusGone, why)
}

// request is one call of a method.
type request struct {
	unit, verb string // for errors
	path       dbus.ObjectPath
	method     string // with its interface
	args       []any
	// once: it must not be sent a second time when the bus went away meanwhile.
	once bool
	// use is called under the lock just before the request is sent, for each session it is sent on.
	use func(*session)
}

// call sends a request and stores the answer. A request that a restart of the bus or the
// manager swallowed is sent again, unless it must not be.
func (c *Conn) call(ctx context.Context, r request, results ...any) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, callTimeout)
		defer cancel()
	}
	var age uint64
	for {
		s, now, err := c.session(ctx, age, r.use)
		if err != nil {
			return &CallError{Unit: r.unit, Verb: r.verb, Kind: err}
		}
		age = now
		answer := s.bus.Object(systemd, r.path).CallWithContext(ctx, r.method, dbus.FlagNoAutoStart, r.args...)
		if err = answer.Err; err == nil && len(results) > 0 { // else the answer is not of interest
			err = answer.Store(results...)
		}
		if err = callError(r.unit, r.verb, err); err == nil {
			return nil
		}
		if c.life.Err() != nil {
			return &CallError{Unit: r.unit, Verb: r.verb, Kind: ErrClosed}
		}
		if !errors.Is(err, ErrBusGone) || r.once {
			return err
		}
	}
}

// send is a call to the bus itself whose answer nobody needs.
func (s *session) send(method, rule string) {
	s.bus.BusObject().Go(bus+"."+method, dbus.FlagNoReplyExpected, nil, rule)
}

func (s *session) addMatch(ctx context.Context, rule string) error {
	return s.bus.BusObject().CallWithContext(ctx, bus+".AddMatch", 0, rule).Err
}

const ownerRule = "type='signal',sender='" + bus + "',interface='" + bus + "',member='NameOwnerChanged',arg0='" + systemd + "'"

// newOwner is the manager's new unique name, if that is what the signal says; empty: it has
// left the bus.
func newOwner(signal *dbus.Signal) (string, bool) {
	if signal.Name != bus+".NameOwnerChanged" || signal.Sender != bus || len(signal.Body) != 3 {
		return "", false
	}
	name, _ := signal.Body[0].(string)
	owner, ok := signal.Body[2].(string)
	return owner, ok && name == systemd
}

// checkUnit refuses what is no unit name: it would end up in match rules and object paths.
func checkUnit(unit string) error {
	bad := unit == "" || len(unit) > 255 || strings.IndexFunc(unit, func(r rune) bool {
		return r > 127 || !strings.ContainsRune(`abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:-_.\@`, r)
	}) >= 0
	if bad || !strings.Contains(unit, ".") {
		return fmt.Errorf("%q is no unit name", unit)
	}
	return nil
}
