package main

import (
	"context"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// visibleDevices tells NVIDIA's container runtime which GPUs to show; here it tells a test which ones a pod got.
const visibleDevices = "NVIDIA_VISIBLE_DEVICES"

// plugin answers the kubelet.
type plugin struct {
	pluginapi.UnimplementedDevicePluginServer
	devices *devices
}

// GetDevicePluginOptions says that no call is needed beyond Allocate.
func (p *plugin) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

// ListAndWatch sends all devices, and again after every change.
func (p *plugin) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	for {
		devices, changed := p.devices.watch()
		if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: devices}); err != nil {
			return err
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-changed:
		}
	}
}

// Allocate gives devices to containers, or refuses when one of them has become unhealthy meanwhile.
func (p *plugin) Allocate(_ context.Context, request *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	response := &pluginapi.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		if err := p.devices.check(container.DevicesIds); err != nil {
			return nil, status.Error(codes.FailedPrecondition, err.Error())
		}
		response.ContainerResponses = append(response.ContainerResponses, &pluginapi.ContainerAllocateResponse{
			Envs: map[string]string{visibleDevices: strings.Join(container.DevicesIds, ",")},
		})
	}
	return response, nil
}
