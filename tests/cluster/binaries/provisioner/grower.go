package main

import (
	"context"
	"encoding/json"
	"fmt"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// provisionedByAnnotation is set by the library on the volumes it has made.
const provisionedByAnnotation = "pv.kubernetes.io/provisioned-by"

// grower makes volumes larger when their claims ask for more, as a CSI driver's external-resizer does. What fails is
// tried again at the next resync.
type grower struct {
	client  kubernetes.Interface
	volumes *store
}

func (g *grower) handler(ctx context.Context) cache.ResourceEventHandler {
	sync := func(object any) {
		claim := object.(*v1.PersistentVolumeClaim)
		if !wantsMore(claim) {
			return
		}
		if err := g.grow(ctx, claim); err != nil {
			klog.ErrorS(err, "Cannot grow volume", "claim", klog.KObj(claim))
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    sync,
		UpdateFunc: func(_, changed any) { sync(changed) },
	}
}

// wantsMore says whether a claim has a volume that is smaller than what it requests.
func wantsMore(claim *v1.PersistentVolumeClaim) bool {
	request := claim.Spec.Resources.Requests[v1.ResourceStorage]
	capacity := claim.Status.Capacity[v1.ResourceStorage]
	return claim.Status.Phase == v1.ClaimBound && claim.DeletionTimestamp == nil && request.Cmp(capacity) > 0
}

// grow enlarges the file system, then the volume's capacity, then the claim's: each says only what is already true.
func (g *grower) grow(ctx context.Context, claim *v1.PersistentVolumeClaim) error {
	volume, err := g.client.CoreV1().PersistentVolumes().Get(ctx, claim.Spec.VolumeName, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("getting volume %s: %w", claim.Spec.VolumeName, err)
	}
	if volume.Annotations[provisionedByAnnotation] != provisionerName {
		return nil
	}
	capacity := claim.Spec.Resources.Requests[v1.ResourceStorage]
	if g.volumes.isLimited(volume.Name) {
		capacity = imageCapacity(capacity)
		if err := g.volumes.grow(volume.Name, capacity.Value()); err != nil {
			return fmt.Errorf("growing volume %s to %s: %w", volume.Name, &capacity, err)
		}
	}
	_, err = g.client.CoreV1().PersistentVolumes().Patch(ctx, volume.Name, types.MergePatchType,
		capacityPatch("spec", capacity), metav1.PatchOptions{})
	if err != nil {
		return fmt.Errorf("setting the capacity of volume %s: %w", volume.Name, err)
	}
	_, err = g.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Patch(ctx, claim.Name, types.MergePatchType,
		capacityPatch("status", capacity), metav1.PatchOptions{}, "status")
	if err != nil {
		return fmt.Errorf("setting the capacity of claim %s: %w", claim.Name, err)
	}
	klog.InfoS("Grew volume", "volume", volume.Name, "claim", klog.KObj(claim), "capacity", &capacity)
	return nil
}

// capacityPatch is the JSON merge patch that sets the storage capacity in a section, "spec" or "status", of an object.
func capacityPatch(section string, capacity resource.Quantity) []byte {
	patch := map[string]any{section: map[string]any{"capacity": map[string]any{"storage": capacity.String()}}}
	text, err := json.Marshal(patch)
	if err != nil {
		panic(err) // strings in maps can always be written
	}
	return text
}
