package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/api/resource"
)

const (
	mebibyte = 1 << 20

	// minimumImage is the smallest file system that mkfs.xfs makes, in bytes.
	minimumImage = 300 * mebibyte

	// everyone may write, as on an export for pods that run as any user: a hostPath volume gets no fsGroup.
	everyone fs.FileMode = 0o777
)

// imageCapacity is the capacity of the volume for a request: whole mebibytes, and no less than XFS needs. Providers
// have such minimums too. What a pod can write is about 64 MiB less: the log of the file system.
func imageCapacity(request resource.Quantity) resource.Quantity {
	size := max(request.Value(), minimumImage)
	size = (size + mebibyte - 1) / mebibyte * mebibyte
	return *resource.NewQuantity(size, resource.BinarySI)
}

// store keeps volumes below a root directory, each in a directory of the volume's name.
type store struct {
	root   string
	images string // the files behind volumes of limited size
	mu     sync.Mutex
}

func newStore(root string) (*store, error) {
	if !filepath.IsAbs(root) {
		return nil, fmt.Errorf("the root directory of the volumes must be an absolute path, not %q", root)
	}
	s := &store{root: filepath.Clean(root), images: filepath.Join(root, ".images")}
	if err := os.MkdirAll(s.images, 0o700); err != nil {
		return nil, fmt.Errorf("making the directory of the images: %w", err)
	}
	return s, nil
}

func (s *store) directory(volume string) string { return filepath.Join(s.root, volume) }
func (s *store) image(volume string) string     { return filepath.Join(s.images, volume+".xfs") }

// makeUnlimited makes a plain directory.
func (s *store) makeUnlimited(volume string) error {
	return makeDirectory(s.directory(volume))
}

// makeLimited makes a mounted file system of size bytes. What an earlier call has left half made is made again.
func (s *store) makeLimited(volume string, size int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	directory := s.directory(volume)
	mounted, err := isMountPoint(directory)
	if err != nil {
		return err
	}
	if mounted {
		return nil
	}
	if err := s.makeImage(volume, size); err != nil {
		return err
	}
	if err := makeDirectory(directory); err != nil {
		return err
	}
	// discard: what is deleted in the volume leaves the image too
	if _, err := command("mount", "-t", "xfs", "-o", "loop,discard", s.image(volume), directory); err != nil {
		return err
	}
	return os.Chmod(directory, everyone)
}

func (s *store) makeImage(volume string, size int64) error {
	file, err := os.Create(s.image(volume))
	if err != nil {
		return err
	}
	defer file.Close()
	if err := file.Truncate(size); err != nil {
		return err
	}
	_, err = command("mkfs.xfs", "-q", "-f", "-K", s.image(volume))
	return err
}

// isLimited says whether a volume was made by makeLimited.
func (s *store) isLimited(volume string) bool {
	_, err := os.Stat(s.image(volume))
	return err == nil
}

// grow makes a volume of limited size larger, to size bytes, while pods use it. It never makes one smaller.
func (s *store) grow(volume string, size int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	image, err := os.Stat(s.image(volume))
	if err != nil {
		return err
	}
	if image.Size() < size {
		if err := os.Truncate(s.image(volume), size); err != nil {
			return err
		}
	}
	device, err := command("findmnt", "--noheadings", "--output", "SOURCE", "--mountpoint", s.directory(volume))
	if err != nil {
		return err
	}
	if _, err := command("losetup", "--set-capacity", device); err != nil {
		return err
	}
	_, err = command("xfs_growfs", s.directory(volume))
	return err
}

// remove unmounts a volume and deletes what it holds. A volume that is not there is no error.
func (s *store) remove(volume string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	directory := s.directory(volume)
	mounted, err := isMountPoint(directory)
	if err != nil {
		return err
	}
	if mounted {
		// lazily: a container that is just ending on some node must not hold up the deletion
		if err := unix.Unmount(directory, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmounting %s: %w", directory, err)
		}
	}
	return errors.Join(os.RemoveAll(s.image(volume)), os.RemoveAll(directory))
}

func makeDirectory(path string) error {
	if err := os.MkdirAll(path, everyone); err != nil {
		return err
	}
	return os.Chmod(path, everyone) // whatever the umask is
}

// isMountPoint says whether a file system is mounted on path, which need not exist.
func isMountPoint(path string) (bool, error) {
	var here, above unix.Stat_t
	err := unix.Stat(path, &here)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("looking at %s: %w", path, err)
	}
	if err := unix.Stat(filepath.Dir(path), &above); err != nil {
		return false, fmt.Errorf("looking at %s: %w", filepath.Dir(path), err)
	}
	return here.Dev != above.Dev, nil
}

// command runs a program and returns what it printed; an error carries what it said.
func command(name string, arguments ...string) (string, error) {
	var complaint strings.Builder
	cmd := exec.Command(name, arguments...)
	cmd.Stderr = &complaint
	output, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, strings.TrimSpace(complaint.String()))
	}
	return strings.TrimSpace(string(output)), nil
}
