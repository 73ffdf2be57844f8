package main

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

func allocate(p *plugin, ids ...string) (*pluginapi.AllocateResponse, error) {
	return p.Allocate(context.Background(), &pluginapi.AllocateRequest{
		ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}},
	})
}

func TestContainerSeesTheDevicesItGot(t *testing.T) {
	p := &plugin{devices: newDevices(map[string]string{"GPU-0": "healthy", "GPU-1": "healthy"})}
	response, err := allocate(p, "GPU-0", "GPU-1")
	if err != nil {
		t.Fatal(err)
	}
	if got := response.ContainerResponses[0].Envs["NVIDIA_VISIBLE_DEVICES"]; got != "GPU-0,GPU-1" {
		t.Errorf("NVIDIA_VISIBLE_DEVICES = %q", got)
	}
}

func TestUnhealthyAndUnknownDevicesAreRefused(t *testing.T) {
	p := &plugin{devices: newDevices(map[string]string{"GPU-0": "healthy"})}
	p.devices.update(map[string]string{"GPU-0": "failed"})
	for _, id := range []string{"GPU-0", "GPU-7"} {
		if _, err := allocate(p, id); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("allocating %s: %v", id, err)
		}
	}
}

// kubelet takes registrations, as a kubelet does on its socket.
type kubelet struct {
	pluginapi.UnimplementedRegistrationServer
	registered chan *pluginapi.RegisterRequest
}

func (k *kubelet) Register(_ context.Context, request *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	k.registered <- request
	return &pluginapi.Empty{}, nil
}

// startKubelet removes all sockets of the directory first, as a kubelet does.
func startKubelet(t *testing.T, directory string) (*kubelet, *grpc.Server) {
	t.Helper()
	sockets, _ := filepath.Glob(filepath.Join(directory, "*.sock"))
	for _, socket := range sockets {
		os.Remove(socket)
	}
	listener, err := net.Listen("unix", filepath.Join(directory, "kubelet.sock"))
	if err != nil {
		t.Fatal(err)
	}
	k := &kubelet{registered: make(chan *pluginapi.RegisterRequest, 1)}
	server := grpc.NewServer()
	pluginapi.RegisterRegistrationServer(server, k)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	return k, server
}

func TestEveryKubeletThatStartsGetsTheDevicesAndTheirChanges(t *testing.T) {
	directory := t.TempDir()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	devices := newDevices(map[string]string{"GPU-0": "healthy"})
	e := &endpoint{directory: directory, resource: "nvidia.com/gpu", plugin: &plugin{devices: devices}}
	defer e.stop()
	if err := e.follow(ctx); err != nil {
		t.Fatalf("without a kubelet: %v", err)
	}

	_, server := startKubelet(t, directory)
	if err := e.follow(ctx); err != nil {
		t.Fatal(err)
	}
	server.Stop()
	second, _ := startKubelet(t, directory)
	for range 2 { // the second time there is nothing to do
		if err := e.follow(ctx); err != nil {
			t.Fatal(err)
		}
	}
	request := <-second.registered
	if request.ResourceName != "nvidia.com/gpu" || request.Version != "v1beta1" {
		t.Errorf("registered: %v", request)
	}

	connection, err := grpc.NewClient("unix:"+filepath.Join(directory, request.Endpoint),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
	stream, err := pluginapi.NewDevicePluginClient(connection).ListAndWatch(ctx, &pluginapi.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{pluginapi.Healthy, pluginapi.Unhealthy} {
		response, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if got := response.Devices[0].Health; got != want {
			t.Errorf("health = %s, want %s", got, want)
		}
		devices.update(map[string]string{"GPU-0": "failed"})
	}
}
