package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"net"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// registrationTimeout is how long the kubelet may take to answer; it calls back meanwhile.
const registrationTimeout = 5 * time.Second

// endpoint serves the plugin on a socket that the kubelet knows of.
type endpoint struct {
	directory string
	resource  string
	plugin    pluginapi.DevicePluginServer

	kubelet os.FileInfo // the socket of the kubelet that was registered with
	server  *grpc.Server
}

// follow registers with the kubelet, and anew with each kubelet that starts. A kubelet that starts removes all sockets
// in the directory and makes its own: one that is not the socket of the last time belongs to a new kubelet.
func (e *endpoint) follow(ctx context.Context) error {
	kubelet, err := os.Stat(e.kubeletSocket())
	if errors.Is(err, fs.ErrNotExist) {
		return nil // not up yet, or restarting
	}
	if err != nil {
		return fmt.Errorf("looking for the kubelet: %w", err)
	}
	if e.kubelet != nil && os.SameFile(kubelet, e.kubelet) && kubelet.ModTime().Equal(e.kubelet.ModTime()) {
		return nil
	}
	e.stop()
	if err := e.serve(); err != nil {
		return err
	}
	if err := e.register(ctx); err != nil {
		return err
	}
	e.kubelet = kubelet
	log.Printf("registered %s with the kubelet", e.resource)
	return nil
}

func (e *endpoint) kubeletSocket() string {
	return filepath.Join(e.directory, filepath.Base(pluginapi.KubeletSocket))
}

// serve answers on the plugin's own socket, in the background.
func (e *endpoint) serve() error {
	socket := filepath.Join(e.directory, socketName)
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing the socket of an earlier run: %w", err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	server := grpc.NewServer()
	pluginapi.RegisterDevicePluginServer(server, e.plugin)
	go func() {
		if err := server.Serve(listener); err != nil {
			log.Printf("serving on %s: %v", socket, err)
		}
	}()
	e.server = server
	return nil
}

// register tells the kubelet of the plugin's socket.
func (e *endpoint) register(ctx context.Context) error {
	connection, err := grpc.NewClient("unix:"+e.kubeletSocket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connecting to the kubelet: %w", err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(ctx, registrationTimeout)
	defer cancel()
	_, err = pluginapi.NewRegistrationClient(connection).Register(ctx, &pluginapi.RegisterRequest{
		Version:      pluginapi.Version,
		Endpoint:     socketName,
		ResourceName: e.resource,
		Options:      &pluginapi.DevicePluginOptions{},
	})
	if err != nil {
		return fmt.Errorf("registering with the kubelet: %w", err)
	}
	return nil
}

// stop ends what serve has started.
func (e *endpoint) stop() {
	if e.server != nil {
		e.server.Stop()
		e.server = nil
	}
}
