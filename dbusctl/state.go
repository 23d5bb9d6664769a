// The manager's own state.
package dbusctl

import (
	"context"

	"github.com/godbus/dbus/v5"
)

// Stopping reports whether the manager is shutting down, as at logout.
func (c *Conn) Stopping(ctx context.Context) (bool, error) {
	var state dbus.Variant
	err := c.call(ctx, request{verb: "system state", path: managerPath, method: properties + ".Get", args: []any{manager, "SystemState"}}, &state)
	if err != nil {
		return false, err
	}
	word, _ := state.Value().(string)
	return word == "stopping", nil
}
