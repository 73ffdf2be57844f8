// Gpuplugin is a device plugin for GPUs that are not there, so that a test cluster's scheduler and kubelets treat
// GPUs as on a real one, and tests can break them.
//
// It speaks the kubelet's device plugin protocol. The GPUs are the files of a directory: the name is the device's id,
// the content, one word, is its state (see the states in devices.go). As NVIDIA's plugin does, it looks for devices
// only when it starts, and a device that has become unhealthy stays so until the plugin is restarted.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	// pollPeriod is how often the states and the kubelet's socket are looked at.
	pollPeriod = 200 * time.Millisecond
	// socketName is the plugin's own socket, beside the kubelet's.
	socketName = "testcluster-gpu.sock"
)

func main() {
	resource := flag.String("resource", "nvidia.com/gpu", "name of the extended resource")
	state := flag.String("state", "/run/testcluster/gpus", "directory with one file per GPU: its state")
	flag.Parse()
	log.SetOutput(os.Stdout)

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *resource, *state); err != nil {
		log.Fatalf("cannot offer %s: %v", *resource, err)
	}
}

// run offers the devices to every kubelet that comes up, until ctx ends.
func run(ctx context.Context, resource, stateDirectory string) error {
	states, err := readStates(stateDirectory)
	if err != nil {
		return err
	}
	devices := newDevices(states)
	log.Printf("%d of %s in %s", len(devices.list()), resource, stateDirectory)

	endpoint := &endpoint{
		directory: pluginapi.DevicePluginPath,
		resource:  resource,
		plugin:    &plugin{devices: devices},
	}
	defer endpoint.stop()
	tick := time.NewTicker(pollPeriod)
	defer tick.Stop()
	for {
		states, err := readStates(stateDirectory)
		if err != nil {
			return err
		}
		for _, change := range devices.update(states) {
			log.Print(change)
		}
		if err := endpoint.follow(ctx); err != nil {
			log.Printf("not registered with the kubelet, will try again: %v", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// readStates returns the state of every GPU, by its id.
func readStates(directory string) (map[string]string, error) {
	entries, err := os.ReadDir(directory)
	if err != nil {
		return nil, fmt.Errorf("looking for GPUs: %w", err)
	}
	states := make(map[string]string, len(entries))
	for _, entry := range entries {
		content, err := os.ReadFile(filepath.Join(directory, entry.Name()))
		if err != nil {
			return nil, fmt.Errorf("reading the state of a GPU: %w", err)
		}
		states[entry.Name()] = string(content)
	}
	return states, nil
}
