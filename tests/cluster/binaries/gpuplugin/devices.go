package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// What a GPU's file can say.
const (
	stateHealthy = "healthy" // works
	stateFailed  = "failed"  // has reported an XID error; works again for a plugin that starts later
	stateLost    = "lost"    // fell off the bus: a plugin that starts later does not find it
)

// devices are the GPUs that were found at the start, and which of them are still healthy.
type devices struct {
	mu      sync.Mutex
	health  map[string]string // by device id
	reset   map[string]bool   // those that had failed before the start, until something else is said of them
	changed chan struct{}     // closed at the next change
}

func newDevices(states map[string]string) *devices {
	d := &devices{health: map[string]string{}, reset: map[string]bool{}, changed: make(chan struct{})}
	for id, state := range states {
		state = strings.TrimSpace(state)
		if state != stateLost {
			d.health[id] = pluginapi.Healthy
		}
		d.reset[id] = state == stateFailed
	}
	return d
}

// update takes in what the files say now, and returns a line for each device that has become unhealthy. A device
// without a file is lost. An empty file is being written and says nothing yet.
func (d *devices) update(states map[string]string) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var changes []string
	for _, id := range slices.Sorted(maps.Keys(d.health)) {
		state, found := states[id]
		state = strings.TrimSpace(state)
		if !found {
			state = stateLost
		}
		d.reset[id] = d.reset[id] && (state == stateFailed || state == "")
		if d.reset[id] || state == stateHealthy || state == "" || d.health[id] == pluginapi.Unhealthy {
			continue
		}
		d.health[id] = pluginapi.Unhealthy
		changes = append(changes, fmt.Sprintf("%s: %s, unhealthy from now on", id, state))
	}
	if len(changes) > 0 {
		close(d.changed)
		d.changed = make(chan struct{})
	}
	return changes
}

// list returns all devices, sorted by id.
func (d *devices) list() []*pluginapi.Device {
	devices, _ := d.watch()
	return devices
}

// watch returns all devices, sorted by id, and a channel that is closed when one of them changes.
func (d *devices) watch() ([]*pluginapi.Device, <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var found []*pluginapi.Device
	for _, id := range slices.Sorted(maps.Keys(d.health)) {
		found = append(found, &pluginapi.Device{ID: id, Health: d.health[id]})
	}
	return found, d.changed
}

// check returns an error unless all of ids are healthy devices.
func (d *devices) check(ids []string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, id := range ids {
		switch health, found := d.health[id]; {
		case !found:
			return fmt.Errorf("there is no device %s", id)
		case health != pluginapi.Healthy:
			return fmt.Errorf("device %s is unhealthy", id)
		}
	}
	return nil
}
