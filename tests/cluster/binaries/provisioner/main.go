// Provisioner makes the ReadWriteMany volumes of a test cluster: directories that every node sees at the same path.
//
// It stands for NFS, EFS, Filestore or Azure Files, none of which can be had on one machine. A volume of a class is a
// sparse file with an XFS of the claimed size in it, mounted through a loop device: it really fills up, can be made
// read-only by a remount, and grows while it is in use (XFS, since ext4 asks for CAP_SYS_RESOURCE to grow). With the
// class parameter `limit: "false"` it is a plain directory, whose size nobody enforces, as EFS does.
//
// The provisioner runs in the cluster's mount namespace. The root directory must be a shared mount there, and nodes
// must have it as a slave, so that what is mounted here appears on every node.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v13/controller"
)

const (
	provisionerName = "testcluster.spotune.dev/shared"

	// resyncPeriod is how often all claims are looked at again: the retry of a growth that failed.
	resyncPeriod = 10 * time.Second
	firstRetry   = 200 * time.Millisecond
	lastRetry    = 10 * time.Second
	workers      = 4
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "file with the address of and the credentials for the API server")
	root := flag.String("root", "", "directory that all nodes see, for the volumes")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *kubeconfig, *root); err != nil {
		klog.ErrorS(err, "Cannot provision volumes")
		os.Exit(1)
	}
}

func run(ctx context.Context, kubeconfig, root string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return fmt.Errorf("reading %s: %w", kubeconfig, err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("making a client from %s: %w", kubeconfig, err)
	}
	volumes, err := newStore(root)
	if err != nil {
		return err
	}

	factory := informers.NewSharedInformerFactory(client, resyncPeriod)
	claims := factory.Core().V1().PersistentVolumeClaims().Informer()
	library := controller.NewProvisionController(ctx, client, provisionerName, &provisioner{volumes},
		controller.ClaimsInformer(claims),
		controller.LeaderElection(false),
		controller.Threadiness(workers),
		controller.RateLimiter(workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, lastRetry)),
	)
	grower := &grower{client: client, volumes: volumes}
	if _, err := claims.AddEventHandler(grower.handler(ctx)); err != nil {
		return fmt.Errorf("watching claims: %w", err)
	}
	factory.Start(ctx.Done())
	klog.InfoS("Provisioning volumes", "provisioner", provisionerName, "root", volumes.root)
	library.Run(ctx)
	return nil
}
