// Package netns sets up a new network namespace from inside, as the launcher does it before
// anything of an agent runs: every address of the world is local there, so that whatever
// a program connects to ends at sockets that are handed out to the supervisor. Nothing
// is routed, and no process of ours stays inside. It judges no connection.
package netns

// MaxPorts bounds the ports of Setup.
const MaxPorts = 100

// Unpaced is the congestion control of what is sent between an agent and the gateway. Nothing
// is congested or lost on that way, and what paces its packets (BBR, which hosts are often set
// to) has a timer interrupt for each few of them there: with it one stream had 0.45 of the
// speed that it has without a boundary, without it 0.8 to 1. Each kernel has this one, and
// lets everybody choose it.
const Unpaced = "reno"

// Letters of the descriptors that a set-up gives, in their order.
const (
	// Assigned is a TCP listener that all connections are given to; a connection's local address
	// is where it wanted to go.
	Assigned = 'a'
	// Redirected is a TCP listener to which all connections are led; where each wanted to
	// go the kernel tells (SO_ORIGINAL_DST).
	Redirected = 'r'
	// Port is a TCP listener for one port of every address; a connection's local address
	// is where it wanted to go.
	Port = 'p'
	// NameTCP and NameUDP serve port 53 of every address.
	NameTCP = 't'
	NameUDP = 'u'
	// UserNamespace and NetNamespace are no sockets: by them others are let in later.
	UserNamespace = 'U'
	NetNamespace  = 'N'
)

// Passed is what a set-up hands out.
type Passed struct {
	FDs   []int
	Kinds string // a letter for each of FDs
	// Weaker says why connections are not led to one listener but each port has its own.
	Weaker string
}
