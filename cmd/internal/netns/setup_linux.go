package netns

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// The addresses of package sandbox, in the form that the kernel takes.
var (
	own4     = [4]byte{198, 19, 255, 1}
	gateway4 = [4]byte{198, 19, 255, 2}
	own6     = [16]byte{0: 0x20, 1: 0x01, 3: 0x02, 6: 0xff, 7: 0xff, 15: 1}
	gateway6 = [16]byte{0: 0x20, 1: 0x01, 3: 0x02, 6: 0xff, 7: 0xff, 15: 2}
)

// gatewayPort is where redirected connections arrive: a port that no program without
// CAP_NET_BIND_SERVICE could want.
const gatewayPort = 1

// lo is the loopback's index in every new namespace.
const lo = 1

// backlog is how many connections may wait for the supervisor, per listener.
const backlog = 4096

// Setup makes every address local, leads all TCP connections but those to the loopback and
// to the sandbox's own address to one listener, and opens the listeners. ports are what
// is listened on where the kernel cannot lead them (no nft): the rest is refused then.
// It takes CAP_NET_ADMIN and CAP_NET_BIND_SERVICE. The loopback is up already.
func Setup(ports []uint16) (*Passed, error) {
	return setup(ports, assign, redirect)
}

func setup(ports []uint16, assign, redirect func(six bool) error) (*Passed, error) {
	// The gateway's own is local like all others. If lo had it, too, what goes there would come from
	// there, and a connection whose port is the one that it happens to come from would be one to itself:
	// of connections to host:PORT with a port from 32768 on, one in 14,000.
	if err := route(unix.AF_INET, own4[:]); err != nil {
		return nil, fmt.Errorf("routes: %w", err)
	}
	// A kernel without IPv6 has no destinations there either.
	six := true
	// Here nothing but an address of lo can be listened on, and no rule leads to the gateway's.
	if err := route(unix.AF_INET6, own6[:], gateway6[:]); err != nil {
		if !errors.Is(err, unix.EAFNOSUPPORT) && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EACCES) {
			return nil, fmt.Errorf("routes for IPv6: %w", err)
		}
		six = false
	}
	// A kernel that cannot do these is slower, no more.
	_ = packets()
	_ = unpaced()
	s := &Passed{}
	if s.takeAll(Assigned, six, assign) != nil {
		if err := s.takeAll(Redirected, six, redirect); err != nil {
			s.Weaker = err.Error()
			if len(ports) > MaxPorts {
				return nil, fmt.Errorf("%d ports to listen on, at most %d are possible without nft", len(ports), MaxPorts)
			}
			for _, p := range ports {
				if p == 53 {
					continue // names have it
				}
				if err := s.open(six, opening{Port, unix.SOCK_STREAM, &unix.SockaddrInet4{Port: int(p)}}, opening{Port, unix.SOCK_STREAM, &unix.SockaddrInet6{Port: int(p)}}); err != nil {
					return nil, err
				}
			}
		}
	}
	err := s.open(six, opening{NameUDP, unix.SOCK_DGRAM, &unix.SockaddrInet4{Port: 53}}, opening{NameUDP, unix.SOCK_DGRAM, &unix.SockaddrInet6{Port: 53}},
		opening{NameTCP, unix.SOCK_STREAM, &unix.SockaddrInet4{Port: 53}}, opening{NameTCP, unix.SOCK_STREAM, &unix.SockaddrInet6{Port: 53}})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// takeAll opens the gateway's listeners, of a kind, and has by lead all connections there. What
// fails leaves nothing behind, so that another way can be tried.
func (s *Passed) takeAll(kind rune, six bool, by func(six bool) error) error {
	err := s.open(six, opening{kind, unix.SOCK_STREAM, &unix.SockaddrInet4{Port: gatewayPort, Addr: gateway4}},
		opening{kind, unix.SOCK_STREAM, &unix.SockaddrInet6{Port: gatewayPort, Addr: gateway6}})
	if err == nil {
		err = by(six)
	}
	if err != nil {
		for _, fd := range s.FDs {
			unix.Close(fd)
		}
		s.FDs, s.Kinds = nil, ""
	}
	return err
}

func (s *Passed) open(six bool, wanted ...opening) error {
	for _, o := range wanted {
		if _, is6 := o.at.(*unix.SockaddrInet6); is6 && !six {
			continue
		}
		fd, err := o.open()
		if err != nil {
			return fmt.Errorf("a listener: %w", err)
		}
		s.FDs, s.Kinds = append(s.FDs, fd), s.Kinds+string(o.kind)
	}
	return nil
}

// opening is one socket to open.
type opening struct {
	kind rune
	typ  int
	at   unix.Sockaddr
}

func (o opening) open() (fd int, err error) {
	family := unix.AF_INET
	if _, six := o.at.(*unix.SockaddrInet6); six {
		family = unix.AF_INET6
	}
	// Plain TCP: of a client that speaks MPTCP to an MPTCP listener the kernel does not tell
	// where it wanted to go.
	if fd, err = unix.Socket(family, o.typ|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
		return -1, err
	}
	set := func(level, option int) {
		if err == nil {
			err = unix.SetsockoptInt(fd, level, option, 1)
		}
	}
	if family == unix.AF_INET6 {
		set(unix.IPPROTO_IPV6, unix.IPV6_V6ONLY)
	}
	if o.kind == Assigned {
		if family == unix.AF_INET6 {
			set(unix.IPPROTO_IPV6, unix.IPV6_TRANSPARENT)
		} else {
			set(unix.IPPROTO_IP, unix.IP_TRANSPARENT)
		}
	}
	if o.kind == NameUDP {
		// An answer comes from the address that was asked. IPv6 lets a socket send from an
		// address that no device has only with FREEBIND.
		if family == unix.AF_INET6 {
			set(unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO)
			set(unix.IPPROTO_IPV6, unix.IPV6_FREEBIND)
		} else {
			set(unix.IPPROTO_IP, unix.IP_PKTINFO)
		}
	}
	if err == nil {
		err = unix.Bind(fd, o.at)
	}
	if err == nil && o.typ == unix.SOCK_STREAM {
		// What it accepts has it, too. See unpaced.
		_ = unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, Unpaced)
		err = unix.Listen(fd, backlog)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// route gives lo the sandbox's own address, which connections come from, and others, and makes all
// of the family local.
func route(family uint8, own []byte, others ...[]byte) error {
	var t batch
	const flags = unix.NLM_F_ACK | unix.NLM_F_CREATE | unix.NLM_F_EXCL
	for _, a := range append([][]byte{own}, others...) {
		// ifaddrmsg: family, length of the prefix, flags, scope, index
		t.add(unix.RTM_NEWADDR, flags, append([]byte{family, uint8(len(a) * 8), unix.IFA_F_NODAD, unix.RT_SCOPE_UNIVERSE}, u32(lo)...),
			attr(unix.IFA_LOCAL, a), attr(unix.IFA_ADDRESS, a))
	}
	// rtmsg: family, lengths of destination and source, tos, table, protocol, scope, type, flags
	t.add(unix.RTM_NEWROUTE, flags, append([]byte{family, 0, 0, 0, unix.RT_TABLE_LOCAL, unix.RTPROT_STATIC, unix.RT_SCOPE_HOST, unix.RTN_LOCAL}, u32(0)...),
		attr(unix.RTA_OIF, u32(lo)), attr(unix.RTA_PREFSRC, own))
	return t.send(unix.NETLINK_ROUTE)
}

// largest is how much TCP may hand to lo at once, in bytes. What passes here has the way
// through the stack twice, and most of what that costs is by the packet.
const largest = 8 * 65535 // the most that the kernel takes

// packets lets lo carry larger ones than 64 KiB: from Linux 5.19 on for IPv6, from 6.3 on
// for IPv4. An older kernel passes over what it does not know.
func packets() error {
	var t batch
	// ifinfomsg: family, padding, type, index, flags, changed flags
	t.add(unix.RTM_SETLINK, unix.NLM_F_ACK, append([]byte{unix.AF_UNSPEC, 0, 0, 0}, slices.Concat(u32(lo), u32(0), u32(0))...),
		attr(unix.IFLA_GSO_MAX_SIZE, u32(largest)), attr(unix.IFLA_GSO_IPV4_MAX_SIZE, u32(largest)))
	return t.send(unix.NETLINK_ROUTE)
}

// unpaced has the programs of the namespace send without pacing.
func unpaced() error {
	fd, err := unix.Open("/proc/sys/net/ipv4/tcp_congestion_control", unix.O_WRONLY|unix.O_CLOEXEC, 0) //nolint:forbidigo // a file of the kernel's, and package os would make each start slower
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = unix.Write(fd, []byte(Unpaced))
	return err
}

// assign gives TCP connections to the gateway's listener as they are (tproxy): each packet
// stays what it was, and no connection is tracked.
func assign(six bool) error {
	err := lead(six, "filter", unix.NF_INET_PRE_ROUTING, -150, func(proto uint8) []byte {
		// Family, registers of address and port.
		return expr("tproxy", attr(1, be32(uint32(proto))), attr(2, be32(unix.NFT_REG_1)), attr(3, be32(unix.NFT_REG_2)))
	})
	if err != nil {
		return fmt.Errorf("this kernel has no nft tproxy (%w)", err)
	}
	return nil
}

// redirect rewrites where TCP connections go to.
func redirect(six bool) error {
	err := lead(six, "nat", unix.NF_INET_LOCAL_OUT, -100, func(proto uint8) []byte {
		return expr("nat", attr(unix.NFTA_NAT_TYPE, be32(unix.NFT_NAT_DNAT)), attr(unix.NFTA_NAT_FAMILY, be32(uint32(proto))),
			attr(unix.NFTA_NAT_REG_ADDR_MIN, be32(unix.NFT_REG_1)), attr(unix.NFTA_NAT_REG_PROTO_MIN, be32(unix.NFT_REG_2)))
	})
	if err != nil {
		return fmt.Errorf("this kernel has no nft address translation (%w)", err)
	}
	return nil
}

// lead adds an nft table that does last with each TCP packet that is not for the loopback, for
// the sandbox itself or for names: with the gateway's address in register 1 and its port in register 2.
func lead(six bool, chain string, hook uint32, priority int32, last func(proto uint8) []byte) error {
	const name = "agentconnect"
	var t batch
	subsystem := func(msg uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | msg }
	const create = unix.NLM_F_ACK | unix.NLM_F_CREATE
	// nfgenmsg: family, version, resource in network order
	header := []byte{unix.NFPROTO_INET, unix.NFNETLINK_V0, 0, 0}
	edge := []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}
	t.add(unix.NFNL_MSG_BATCH_BEGIN, 0, edge)
	t.add(subsystem(unix.NFT_MSG_NEWTABLE), create, header, attr(unix.NFTA_TABLE_NAME, cstring(name)))
	t.add(subsystem(unix.NFT_MSG_NEWCHAIN), create, header,
		attr(unix.NFTA_CHAIN_TABLE, cstring(name)), attr(unix.NFTA_CHAIN_NAME, cstring("lead")), attr(unix.NFTA_CHAIN_TYPE, cstring(chain)),
		nest(unix.NFTA_CHAIN_HOOK, attr(unix.NFTA_HOOK_HOOKNUM, be32(hook)), attr(unix.NFTA_HOOK_PRIORITY, be32(uint32(priority)))))
	rule := func(exprs ...[]byte) {
		t.add(subsystem(unix.NFT_MSG_NEWRULE), create|unix.NLM_F_APPEND, header,
			attr(unix.NFTA_RULE_TABLE, cstring(name)), attr(unix.NFTA_RULE_CHAIN, cstring("lead")), nest(unix.NFTA_RULE_EXPRESSIONS, exprs...))
	}
	accept := expr("immediate", attr(unix.NFTA_IMMEDIATE_DREG, be32(unix.NFT_REG_VERDICT)),
		nest(unix.NFTA_IMMEDIATE_DATA, nest(unix.NFTA_DATA_VERDICT, attr(unix.NFTA_VERDICT_CODE, be32(nfAccept)))))
	tcp := meta(unix.NFT_META_L4PROTO, []byte{unix.IPPROTO_TCP})
	// Names have a listener of their own on port 53.
	rule(tcp[0], tcp[1], payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2), equals([]byte{0, 53}), accept)
	family := func(proto uint8, loopback, own, gateway []byte, offset uint32) {
		is := meta(unix.NFT_META_NFPROTO, []byte{proto})
		rule(is[0], is[1], payload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, uint32(len(loopback))), equals(loopback), accept)
		rule(is[0], is[1], payload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, uint32(len(own))), equals(own), accept)
		rule(is[0], is[1], tcp[0], tcp[1], load(unix.NFT_REG_1, gateway), load(unix.NFT_REG_2, []byte{0, gatewayPort}), last(proto))
	}
	family(unix.NFPROTO_IPV4, []byte{127}, own4[:], gateway4[:], 16)
	if six {
		family(unix.NFPROTO_IPV6, append(make([]byte, 15), 1), own6[:], gateway6[:], 24)
	}
	t.add(unix.NFNL_MSG_BATCH_END, 0, edge)
	return t.send(unix.NETLINK_NETFILTER)
}

// nfAccept is NF_ACCEPT, which x/sys lacks.
const nfAccept = 1

func expr(name string, parts ...[]byte) []byte {
	return nest(unix.NFTA_LIST_ELEM, attr(unix.NFTA_EXPR_NAME, cstring(name)), nest(unix.NFTA_EXPR_DATA, parts...))
}

// equals goes on if register 1 holds value.
func equals(value []byte) []byte {
	return expr("cmp", attr(unix.NFTA_CMP_SREG, be32(unix.NFT_REG_1)), attr(unix.NFTA_CMP_OP, be32(unix.NFT_CMP_EQ)),
		nest(unix.NFTA_CMP_DATA, attr(unix.NFTA_DATA_VALUE, value)))
}

// meta compares what the kernel knows of a packet with value.
func meta(key uint32, value []byte) [2][]byte {
	return [2][]byte{expr("meta", attr(unix.NFTA_META_DREG, be32(unix.NFT_REG_1)), attr(unix.NFTA_META_KEY, be32(key))), equals(value)}
}

// payload puts a part of a packet into register 1.
func payload(base, offset, size uint32) []byte {
	return expr("payload", attr(unix.NFTA_PAYLOAD_DREG, be32(unix.NFT_REG_1)), attr(unix.NFTA_PAYLOAD_BASE, be32(base)),
		attr(unix.NFTA_PAYLOAD_OFFSET, be32(offset)), attr(unix.NFTA_PAYLOAD_LEN, be32(size)))
}

// load puts value into a register.
func load(register uint32, value []byte) []byte {
	return expr("immediate", attr(unix.NFTA_IMMEDIATE_DREG, be32(register)), nest(unix.NFTA_IMMEDIATE_DATA, attr(unix.NFTA_DATA_VALUE, value)))
}
