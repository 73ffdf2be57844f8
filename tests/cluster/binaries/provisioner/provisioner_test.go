package main

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

func TestCapacityIsWholeMebibytesAndNoLessThanXFSNeeds(t *testing.T) {
	for request, want := range map[string]string{
		"1":          "300Mi",
		"300Mi":      "300Mi",
		"314572801":  "301Mi",
		"1Gi":        "1Gi",
		"1G":         "954Mi",
		"1073741825": "1025Mi",
	} {
		got := imageCapacity(resource.MustParse(request))
		if got.String() != want {
			t.Errorf("imageCapacity(%s) = %s, want %s", request, &got, want)
		}
	}
}

func TestSizeIsLimitedUnlessTheClassSaysOtherwise(t *testing.T) {
	for _, test := range []struct {
		parameters map[string]string
		limited    bool
		fails      bool
	}{
		{nil, true, false},
		{map[string]string{"limit": "true"}, true, false},
		{map[string]string{"limit": "false"}, false, false},
		{map[string]string{"limit": "perhaps"}, false, true},
		{map[string]string{"type": "ssd"}, false, true},
	} {
		limited, err := isLimited(test.parameters)
		if limited != test.limited || (err != nil) != test.fails {
			t.Errorf("isLimited(%v) = %v, %v", test.parameters, limited, err)
		}
	}
}

func TestOnlyABoundClaimThatRequestsMoreThanItHasGrows(t *testing.T) {
	for _, test := range []struct {
		phase         v1.PersistentVolumeClaimPhase
		request, have string
		want          bool
	}{
		{v1.ClaimBound, "2Gi", "1Gi", true},
		{v1.ClaimBound, "1Gi", "1Gi", false},
		{v1.ClaimBound, "1Mi", "300Mi", false},
		{v1.ClaimPending, "1Gi", "0", false},
		{v1.ClaimLost, "2Gi", "1Gi", false},
	} {
		claim := &v1.PersistentVolumeClaim{}
		claim.Status.Phase = test.phase
		claim.Spec.Resources.Requests = v1.ResourceList{v1.ResourceStorage: resource.MustParse(test.request)}
		claim.Status.Capacity = v1.ResourceList{v1.ResourceStorage: resource.MustParse(test.have)}
		if got := wantsMore(claim); got != test.want {
			t.Errorf("%s claim for %s with %s: wantsMore = %v", test.phase, test.request, test.have, got)
		}
	}
}

func TestUnlimitedVolumeIsAPlainDirectory(t *testing.T) {
	volumes, err := newStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := volumes.makeUnlimited("pvc-1"); err != nil {
		t.Fatal(err)
	}
	if volumes.isLimited("pvc-1") {
		t.Error("its size is limited")
	}
	if err := volumes.remove("pvc-1"); err != nil {
		t.Errorf("removing: %v", err)
	}
	if _, err := os.Stat(volumes.directory("pvc-1")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after the removal: %v", err)
	}
}

func TestPatchSetsOnlyTheCapacity(t *testing.T) {
	got := string(capacityPatch("status", resource.MustParse("2Gi")))
	if want := `{"status":{"capacity":{"storage":"2Gi"}}}`; got != want {
		t.Errorf("capacityPatch = %s, want %s", got, want)
	}
}

func TestLimitedVolumeFillsUpGrowsWhileMountedAndLeavesNothing(t *testing.T) {
	if _, err := exec.LookPath("mkfs.xfs"); err != nil || os.Geteuid() != 0 {
		t.Skip("mounts a file system: needs root and mkfs.xfs")
	}
	volumes, err := newStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := volumes.remove("pvc-1"); err != nil {
			t.Errorf("removing: %v", err)
		}
		if left, err := os.ReadDir(volumes.images); err != nil || len(left) > 0 {
			t.Errorf("images left: %v, %v", left, err)
		}
	})
	for range 2 { // as after an answer that got lost
		if err := volumes.makeLimited("pvc-1", minimumImage); err != nil {
			t.Fatal(err)
		}
	}
	if !volumes.isLimited("pvc-1") {
		t.Error("its size is not limited")
	}
	directory := volumes.directory("pvc-1")
	if info, err := os.Stat(directory); err != nil || info.Mode().Perm() != everyone {
		t.Errorf("mode of the volume: %v, %v", info.Mode(), err)
	}
	file := filepath.Join(directory, "checkpoint")
	if err := allocate(file, minimumImage); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("writing as much as the image holds: %v, want no space left", err)
	}
	if err := volumes.grow("pvc-1", 2*minimumImage); err != nil {
		t.Fatal(err)
	}
	if err := allocate(file, minimumImage); err != nil {
		t.Errorf("writing as much after the growth: %v", err)
	}
}

func allocate(path string, size int64) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer file.Close()
	return unix.Fallocate(int(file.Fd()), 0, 0, size)
}
