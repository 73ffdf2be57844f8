package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v13/controller"
)

// limitParameter is the storage class parameter that says whether a volume's size is enforced; it is unless "false".
const limitParameter = "limit"

// provisioner answers the library, which watches claims and volumes and knows when one has to be made or deleted.
type provisioner struct {
	volumes *store
}

var _ controller.Provisioner = &provisioner{}

// Provision makes the storage of a claim and returns the volume that describes it.
func (p *provisioner) Provision(
	_ context.Context, options controller.ProvisionOptions,
) (*v1.PersistentVolume, controller.ProvisioningState, error) {
	if options.PVC.Spec.Selector != nil {
		return nil, controller.ProvisioningFinished, errors.New("claims with a selector are not supported")
	}
	limited, err := isLimited(options.StorageClass.Parameters)
	if err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	capacity := options.PVC.Spec.Resources.Requests[v1.ResourceStorage]
	if limited {
		capacity = imageCapacity(capacity)
		err = p.volumes.makeLimited(options.PVName, capacity.Value())
	} else {
		err = p.volumes.makeUnlimited(options.PVName)
	}
	if err != nil {
		return nil, controller.ProvisioningFinished, fmt.Errorf("making volume %s: %w", options.PVName, err)
	}

	kind := v1.HostPathDirectory // must exist: a pod must not start on what the volume should have been mounted over
	return &v1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: options.PVName},
		Spec: v1.PersistentVolumeSpec{
			AccessModes:                   options.PVC.Spec.AccessModes,
			Capacity:                      v1.ResourceList{v1.ResourceStorage: capacity},
			PersistentVolumeReclaimPolicy: *options.StorageClass.ReclaimPolicy,
			PersistentVolumeSource: v1.PersistentVolumeSource{
				HostPath: &v1.HostPathVolumeSource{Path: p.volumes.directory(options.PVName), Type: &kind},
			},
		},
	}, controller.ProvisioningFinished, nil
}

// Delete removes the storage of a volume with all that is in it.
func (p *provisioner) Delete(_ context.Context, volume *v1.PersistentVolume) error {
	if err := p.volumes.remove(volume.Name); err != nil {
		return fmt.Errorf("removing volume %s: %w", volume.Name, err)
	}
	return nil
}

func isLimited(parameters map[string]string) (bool, error) {
	for name := range parameters {
		if name != limitParameter {
			return false, fmt.Errorf("storage class has an unknown parameter %q; known: %q", name, limitParameter)
		}
	}
	text, found := parameters[limitParameter]
	if !found {
		return true, nil
	}
	limited, err := strconv.ParseBool(text)
	if err != nil {
		return false, fmt.Errorf("storage class parameter %q: want true or false, not %q", limitParameter, text)
	}
	return limited, nil
}
