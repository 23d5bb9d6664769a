package controlplane

import (
	"errors"
	"fmt"
	"strings"
	"time"
	_ "time/tzdata" // zones are the control plane's to name, also where the host has none

	"github.com/robfig/cron/v3"
)

// Schedule gives the next time after t; the zero time means never.
type Schedule interface{ Next(t time.Time) time.Time }

// parser takes the five fields of crontab(5), a leading field of seconds, and @daily and
// the like.
var parser = cron.NewParser(cron.SecondOptional | cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow | cron.Descriptor)

// maxSchedule bounds a schedule's text; nobody writes longer ones.
const maxSchedule = 256

// Parse reads the schedule in its time zone.
func (c *Cron) Parse() (Schedule, error) {
	if len(c.Schedule) > maxSchedule {
		return nil, fmt.Errorf("schedule: %d bytes, at most %d", len(c.Schedule), maxSchedule)
	}
	if strings.HasPrefix(c.Schedule, "TZ=") || strings.HasPrefix(c.Schedule, "CRON_TZ=") {
		return nil, errors.New("schedule: a time zone stands in timezone, not here")
	}
	zone := time.UTC
	if c.Timezone != "" {
		z, err := time.LoadLocation(c.Timezone)
		if err != nil {
			return nil, fmt.Errorf("timezone %.60q: %w", c.Timezone, err)
		}
		zone = z
	}
	s, err := parser.Parse(c.Schedule)
	if err != nil {
		return nil, fmt.Errorf("schedule %.60q: %w", c.Schedule, err)
	}
	return zoned{s, zone}, nil
}

type zoned struct {
	s    cron.Schedule
	zone *time.Location
}

func (z zoned) Next(t time.Time) time.Time { return z.s.Next(t.In(z.zone)) }
