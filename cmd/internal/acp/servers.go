// The MCP servers that the operator gave the agent: part of every session that a client
// opens or loads, whatever the client names itself.

package acp

import (
	"encoding/json"
	"fmt"
	"strings"
)

// Server is one MCP server of the operator's, as session/new carries it.
type Server struct {
	Name string
	// JSON is the whole object.
	JSON []byte
	// Needs is the capability that the runtime must have for it: "http", "sse", or "" for
	// a server on stdio, which every runtime must take.
	Needs string
}

// addServers gives new params for the frame, with the operator's servers among the
// client's; nil where they stay as they are. Of two with one name the operator's is taken.
// A message says why the call is refused.
func (b *Broker) addServers(f *Frame) (changed []byte, message string) {
	params := f.Bytes(f.Params)
	if len(params) == 0 || params[0] != '{' {
		return nil, "" // the runtime says what it thinks of it
	}
	at, ok := member(params, "mcpServers")
	if !ok {
		return nil, "params must hold mcpServers once"
	}
	var ours []Server
	if b.o.Servers != nil {
		ours = b.o.Servers()
	}
	b.mu.Lock()
	can := b.init.mcp
	b.mu.Unlock()
	list := []byte{'['}
	add := func(v []byte) {
		if len(list) > 1 {
			list = append(list, ',')
		}
		list = append(list, v...)
	}
	names := map[string]bool{}
	for _, s := range ours {
		if s.Needs != "" && !can[s.Needs] {
			b.once("mcp "+s.Name, "the runtime takes no MCP server of this kind; it goes without", "server", s.Name, "transport", s.Needs)
			continue
		}
		names[strings.ToLower(s.Name)] = true
		add(s.JSON)
	}
	if !at.Empty() && string(params[at.Start:at.End]) != "null" {
		if !elements(params[at.Start:at.End], func(v []byte) {
			name := ""
			members(v, func(n []byte, value Span) {
				if string(n) == "name" {
					text, _ := stringValue(v[value.Start:value.End])
					name = strings.ToLower(string(text))
				}
			})
			switch {
			case reservedServer(name):
				message = fmt.Sprintf("mcpServers: the name %q is reserved", name)
			case names[name]:
				b.once("mcp same "+name, "a client's MCP server has the name of one of the agent's own; it is left out", "server", name)
			default:
				add(v)
			}
		}) {
			return nil, "mcpServers must be a list"
		}
	}
	if message != "" {
		return nil, message
	}
	if len(names) == 0 {
		return nil, ""
	}
	list = append(list, ']')
	if at.Empty() {
		out := append([]byte(`{"mcpServers":`), list...)
		if rest := trimLine(params[1:]); len(rest) > 0 && rest[0] != '}' {
			out = append(out, ',')
		}
		return append(out, params[1:]...), ""
	}
	out := append([]byte{}, params[:at.Start]...)
	out = append(out, list...)
	return append(out, params[at.End:]...), ""
}

func reservedServer(lower string) bool {
	return lower == "agentconnect" || strings.HasPrefix(lower, "agentconnect-") || strings.HasPrefix(lower, "agentconnect_")
}

// mcpCapabilities reads from initialize's result which servers the runtime takes.
func mcpCapabilities(result []byte) map[string]bool {
	var r struct {
		Agent struct {
			MCP struct {
				HTTP bool `json:"http"`
				SSE  bool `json:"sse"`
			} `json:"mcpCapabilities"`
		} `json:"agentCapabilities"`
	}
	if json.Unmarshal(result, &r) != nil {
		return nil
	}
	return map[string]bool{"http": r.Agent.MCP.HTTP, "sse": r.Agent.MCP.SSE}
}
