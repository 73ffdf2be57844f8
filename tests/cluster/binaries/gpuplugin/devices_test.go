package main

import (
	"slices"
	"testing"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

func health(d *devices) map[string]string {
	found := map[string]string{}
	for _, device := range d.list() {
		found[device.ID] = device.Health
	}
	return found
}

func TestFailedDeviceStaysUnhealthyUntilThePluginStartsAgain(t *testing.T) {
	d := newDevices(map[string]string{"GPU-0": "healthy\n", "GPU-1": "healthy\n"})
	changes := d.update(map[string]string{"GPU-0": "failed\n", "GPU-1": "healthy\n"})
	if want := []string{"GPU-0: failed, unhealthy from now on"}; !slices.Equal(changes, want) {
		t.Errorf("changes = %q, want %q", changes, want)
	}
	recovered := map[string]string{"GPU-0": "healthy", "GPU-1": "healthy"}
	if changes := d.update(recovered); changes != nil {
		t.Errorf("changes after recovery = %q, want none", changes)
	}
	if got := health(d); got["GPU-0"] != pluginapi.Unhealthy || got["GPU-1"] != pluginapi.Healthy {
		t.Errorf("health before the restart: %v", got)
	}
	if got := health(newDevices(recovered)); got["GPU-0"] != pluginapi.Healthy {
		t.Errorf("health after the restart: %v", got)
	}
}

func TestDeviceThatHadFailedBeforeTheStartIsResetByIt(t *testing.T) {
	failed := map[string]string{"GPU-0": "failed"}
	d := newDevices(failed)
	if changes := d.update(failed); changes != nil {
		t.Errorf("changes = %q, want none", changes)
	}
	d.update(map[string]string{"GPU-0": "healthy"})
	if changes := d.update(failed); len(changes) != 1 {
		t.Errorf("changes after another failure = %q, want one", changes)
	}
}

func TestLostDeviceIsNotListedByThePluginThatStartsNext(t *testing.T) {
	d := newDevices(map[string]string{"GPU-0": "healthy"})
	lost := map[string]string{"GPU-0": "lost"}
	d.update(lost)
	if got := health(d); got["GPU-0"] != pluginapi.Unhealthy {
		t.Errorf("health before the restart: %v", got)
	}
	if got := health(newDevices(lost)); len(got) != 0 {
		t.Errorf("health after the restart: %v, want no device", got)
	}
}

func TestDeviceWhoseFileIsGoneIsLostAndAnEmptyFileSaysNothing(t *testing.T) {
	d := newDevices(map[string]string{"GPU-0": "healthy", "GPU-1": "healthy"})
	d.update(map[string]string{"GPU-1": ""})
	if got := health(d); got["GPU-0"] != pluginapi.Unhealthy || got["GPU-1"] != pluginapi.Healthy {
		t.Errorf("health = %v", got)
	}
}

func TestDeviceThatAppearsLaterIsNotListed(t *testing.T) {
	d := newDevices(nil)
	d.update(map[string]string{"GPU-0": "healthy"})
	if got := health(d); len(got) != 0 {
		t.Errorf("health = %v, want no device", got)
	}
}
