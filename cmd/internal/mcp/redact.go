// What may be shown of definitions.

package mcp

import "encoding/json"

// Redact gives definitions with the values of env and headers, arguments and addresses
// replaced by word: they may hold secrets. What is no JSON comes back as null.
func Redact(raw json.RawMessage, word string) json.RawMessage {
	var v any
	if json.Unmarshal(raw, &v) != nil {
		return json.RawMessage("null")
	}
	out, err := json.Marshal(redact(v, word))
	if err != nil {
		return json.RawMessage("null")
	}
	return out
}

func redact(v any, word string) any {
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			switch k {
			case "env", "headers":
				v[k] = redactVars(e, word)
			case "args", "url":
				v[k] = word
			default:
				v[k] = redact(e, word)
			}
		}
	case []any:
		for i, e := range v {
			v[i] = redact(e, word)
		}
	}
	return v
}

// redactVars keeps names and references to secrets, and nothing else.
func redactVars(v any, word string) any {
	one := func(e any) any {
		m, ok := e.(map[string]any)
		if !ok {
			return word
		}
		for k := range m {
			if k != "name" && k != "secret" {
				m[k] = word
			}
		}
		return m
	}
	switch v := v.(type) {
	case []any:
		for i, e := range v {
			v[i] = one(e)
		}
		return v
	case map[string]any:
		for k, e := range v {
			v[k] = one(e)
		}
		return v
	}
	return word
}
