// Making a unit's name free again.
package dbusctl

import (
	"context"
	"errors"
	"fmt"
)

// Discard stops a transient unit, clears its failed state, and returns when the manager has
// forgotten it, so that one of the same name can be made. One that is not loaded is forgotten
// already. A unit that something keeps loaded (another unit's Wants=) is not; the context
// ends the waiting then.
func (c *Conn) Discard(ctx context.Context, unit string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	changes, err := c.Watch(ctx, unit)
	if err != nil {
		return err
	}
	if err := c.Stop(ctx, unit, Replace); err != nil && !errors.Is(err, ErrNoSuchUnit) {
		return err
	}
	if err := c.ResetFailed(ctx, unit); err != nil && !errors.Is(err, ErrNoSuchUnit) {
		return err
	}
	for {
		p, err := c.Properties(ctx, unit)
		if errors.Is(err, ErrNoSuchUnit) {
			return nil
		}
		if err != nil {
			return err
		}
		if load, _ := p.String("LoadState"); load == "not-found" {
			return nil
		}
		select {
		case change, ok := <-changes:
			if !ok {
				return fmt.Errorf("%s: discard: %w", unit, context.Cause(ctx))
			}
			if change.Gone && !change.Look {
				return nil
			}
		case <-ctx.Done():
			return fmt.Errorf("%s: it stays loaded: %w", unit, context.Cause(ctx))
		}
	}
}
