// Networkpolicy enforces the NetworkPolicies of a test cluster on the node it runs on, with iptables and ipset.
//
// It is kube-router's network policy controller, and only that, in the fork that K3s ships: routes, services and pod
// addresses have other owners here. kube-router's own program would bring a BGP speaker along. The packets between
// pods of one node have to pass iptables for it: net.bridge.bridge-nf-call-iptables must be 1 in the node's network
// namespace.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/cloudnativelabs/kube-router/v2/pkg/controllers/netpol"
	"github.com/cloudnativelabs/kube-router/v2/pkg/healthcheck"
	"github.com/cloudnativelabs/kube-router/v2/pkg/options"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

const (
	// syncPeriod is how often the rules are written anew, changes apart.
	syncPeriod = time.Minute
	// nodePoll is how often to look whether the kubelet has registered the node.
	nodePoll = 200 * time.Millisecond
)

func main() {
	config := options.NewKubeRouterConfig()
	config.EnableIPv4 = true
	config.IPTablesSyncPeriod = syncPeriod
	services := flag.String("services", config.ClusterIPCIDRs[0], "addresses of services")
	flag.StringVar(&config.Kubeconfig, "kubeconfig", "", "file with the address of and the credentials for the API server")
	flag.StringVar(&config.HostnameOverride, "node", hostname(), "name of the node this runs on")
	klog.InitFlags(nil)
	flag.Parse()
	config.ClusterIPCIDRs = []string{*services}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, config); err != nil {
		klog.ErrorS(err, "Cannot enforce network policies")
		os.Exit(1)
	}
}

// hostname is what a kubelet calls its node, unless told otherwise.
func hostname() string {
	name, err := os.Hostname()
	if err != nil {
		return ""
	}
	return name
}

func run(ctx context.Context, config *options.KubeRouterConfig) error {
	access, err := clientcmd.BuildConfigFromFlags("", config.Kubeconfig)
	if err != nil {
		return fmt.Errorf("reading %s: %w", config.Kubeconfig, err)
	}
	client, err := kubernetes.NewForConfig(access)
	if err != nil {
		return fmt.Errorf("making a client from %s: %w", config.Kubeconfig, err)
	}
	if err := waitForNode(ctx, client, config.HostnameOverride); err != nil {
		return err
	}
	return enforce(ctx, client, config)
}

// waitForNode returns when the node has an address: the controller takes it when it is made, once.
func waitForNode(ctx context.Context, client kubernetes.Interface, name string) error {
	var last error
	err := wait.PollUntilContextCancel(ctx, nodePoll, true, func(ctx context.Context) (bool, error) {
		node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		last = err
		return err == nil && len(node.Status.Addresses) > 0, nil
	})
	if err != nil {
		return fmt.Errorf("waiting for node %q: %w (%v)", name, err, last)
	}
	return nil
}

// enforce keeps the node's rules as the policies say, until ctx ends. The rules stay.
func enforce(ctx context.Context, client kubernetes.Interface, config *options.KubeRouterConfig) error {
	iptables, ipsets, err := netpol.NewIPTablesHandlers(config)
	if err != nil {
		return fmt.Errorf("looking for iptables and ipset: %w", err)
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	pods := factory.Core().V1().Pods().Informer()
	namespaces := factory.Core().V1().Namespaces().Informer()
	policies := factory.Networking().V1().NetworkPolicies().Informer()
	factory.Start(ctx.Done())
	for kind, synced := range factory.WaitForCacheSync(ctx.Done()) {
		if !synced {
			return fmt.Errorf("listing %s: %w", kind, ctx.Err())
		}
	}

	var ipsetLock sync.Mutex
	controller, err := netpol.NewNetworkPolicyController(
		client, config, pods, policies, namespaces, &ipsetLock, iptables, ipsets)
	if err != nil {
		return fmt.Errorf("making the network policy controller: %w", err)
	}
	_, podsErr := pods.AddEventHandler(controller.PodEventHandler)
	_, namespacesErr := namespaces.AddEventHandler(controller.NamespaceEventHandler)
	_, policiesErr := policies.AddEventHandler(controller.NetworkPolicyEventHandler)
	if err := errors.Join(podsErr, namespacesErr, policiesErr); err != nil {
		return fmt.Errorf("watching pods, namespaces and policies: %w", err)
	}

	klog.InfoS("Enforcing network policies", "node", config.HostnameOverride, "services", config.ClusterIPCIDRs)
	heartbeats := make(chan *healthcheck.ControllerHeartbeat)
	go func() {
		for range heartbeats { // nobody asks for them, but the controller waits until each is taken
		}
	}()
	var running sync.WaitGroup
	running.Add(1)
	controller.Run(heartbeats, ctx.Done(), &running)
	running.Wait()
	return nil
}
