"""Builds the programs of a test cluster, Helm and kubeconform from pinned Go modules, outside the checkout."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from spotune_testcluster import requirements
from spotune_testcluster.errors import ClusterError
from spotune_testcluster.home import REPOSITORY

SOURCES = REPOSITORY / "tests/cluster"
KUBERNETES = "v1.34.4"
VERSION = "k8s.io/component-base/version"
KUBERNETES_FLAGS = " ".join(
    [
        "-s -w",
        f"-X {VERSION}.gitVersion={KUBERNETES}",
        f"-X {VERSION}.gitMajor=1",
        f"-X {VERSION}.gitMinor=34",
        f"-X {VERSION}.gitTreeState=clean",
    ]
)


@dataclass(frozen=True)
class Module:
    """One Go module and its programs.

    Attributes:
        folder: Its folder below tests/cluster.
        programs: Name of each program by its package. Go's own name is that of a folder.
        flags: Linker flags.
        sources: Patterns of the files that determine what is built.
    """

    folder: str
    programs: Mapping[str, str]
    flags: str = "-s -w"
    sources: tuple[str, ...] = field(default=("go.mod", "go.sum"))

    @property
    def path(self) -> Path:
        """The module's folder."""
        return SOURCES / self.folder

    def key(self) -> str:
        """A hash of everything that determines the programs."""
        digest = hashlib.sha256()
        files = sorted(file for pattern in self.sources for file in self.path.glob(pattern))
        for part in [
            *(file.read_bytes() for file in files),
            repr(sorted(self.programs.items())).encode(),
            self.flags.encode(),
        ]:
            digest.update(hashlib.sha256(part).digest())
        return digest.hexdigest()[:16]


MODULES = (
    Module(
        "binaries",
        {
            "k8s.io/kubernetes/cmd/kube-apiserver": "kube-apiserver",
            "k8s.io/kubernetes/cmd/kube-controller-manager": "kube-controller-manager",
            "k8s.io/kubernetes/cmd/kube-scheduler": "kube-scheduler",
            "k8s.io/kubernetes/cmd/kubelet": "kubelet",
            "k8s.io/kubernetes/cmd/kube-proxy": "kube-proxy",
            "k8s.io/kubernetes/cmd/kubectl": "kubectl",
            "go.etcd.io/etcd/server/v3": "etcd",
            "github.com/ray-project/kuberay/ray-operator": "ray-operator",
            "./coredns": "coredns",
        },
        flags=KUBERNETES_FLAGS,
        sources=("go.mod", "go.sum", "coredns/*.go"),
    ),
    Module(
        "binaries",
        {
            "./provisioner": "provisioner",
            "./gpuplugin": "gpuplugin",
            "./networkpolicy": "networkpolicy",
            "./podsecurity": "podsecurity",
        },
        sources=(
            "go.mod",
            "go.sum",
            *(f"{name}/*.go" for name in ("provisioner", "gpuplugin", "networkpolicy", "podsecurity")),
        ),
    ),
    Module("binaries", {"helm.sh/helm/v3/cmd/helm": "helm"}),
    Module("kubeconform", {"github.com/yannh/kubeconform/cmd/kubeconform": "kubeconform"}),
    Module("gitops", {"./health": "health"}, sources=("go.mod", "go.sum", "health/*.go")),
)


def build(home: Path, report: Callable[[str], None]) -> Path:
    """Return the folder with every program. Missing programs are built, once (about ten minutes on two cores).

    Args:
        home: Everything that is built is kept below it.
        report: Called with a line for every module that has to be built.

    Raises:
        CannotRunHereError: Go is not installed.
        ClusterError: A build failed; the message has the compiler's output.
    """
    with _locked_store(home) as store:
        parts = [_build_module(store, module, report) for module in MODULES]
        everything = store / hashlib.sha256(" ".join(part.name for part in parts).encode()).hexdigest()[:16]
        if not everything.exists():
            _link_all(parts, everything)
    return everything


def build_module(home: Path, module: Module, report: Callable[[str], None] = lambda _line: None) -> Path:
    """Return the folder with the programs of a module that is not a part of every test cluster.

    Args and raises: as `build`.
    """
    with _locked_store(home) as store:
        return _build_module(store, module, report)


@contextmanager
def _locked_store(home: Path) -> Iterator[Path]:
    store = home / "binaries"
    store.mkdir(parents=True, exist_ok=True)
    with (store / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield store


def are_built(home: Path) -> bool:
    """Whether every program is built."""
    return all(_target(home / "binaries", module).exists() for module in MODULES)


def kuberay_resources() -> Path:
    """The folder of KubeRay's custom resource definitions, a part of its Go module."""
    command = ["go", "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", "github.com/ray-project/kuberay/ray-operator"]
    found = subprocess.run(command, cwd=SOURCES / "binaries", capture_output=True, text=True, check=True)
    return Path(found.stdout.strip()) / "config/crd/bases"


def _build_module(store: Path, module: Module, report: Callable[[str], None]) -> Path:
    target = _target(store, module)
    if target.exists():
        return target
    requirements.check_go()
    report(f"building {', '.join(module.programs.values())}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=store) as temporary:
        output = Path(temporary) / "programs"
        output.mkdir()
        _go_build(module, output)
        for package, name in module.programs.items():
            built = output / _go_name(package)
            built.rename(output / name)
        if module.folder == "binaries" and "ray-operator" in module.programs.values():
            shutil.copytree(kuberay_resources(), output / "kuberay-crds")
        output.rename(target)
    report(f"built in {time.monotonic() - began:.0f} s")
    return target


def _target(store: Path, module: Module) -> Path:
    return store / f"{module.folder}-{module.key()}"


def _go_build(module: Module, output: Path) -> None:
    command = [
        "go",
        "build",
        "-mod=readonly",
        "-trimpath",
        "-gcflags=all=-dwarf=false",  # a tenth of the compiler's time; the linker leaves debug information out anyway
        "-ldflags",
        module.flags,
        "-o",
        f"{output}/",
        *module.programs,
    ]
    done = subprocess.run(
        command, cwd=module.path, env={**os.environ, "CGO_ENABLED": "0"}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ClusterError(f"go build in {module.path} failed:\n{done.stderr.strip()[-4000:]}")


def _go_name(package: str) -> str:
    """The name that `go build` gives a package's program: its last folder that is not a major version."""
    names = [name for name in package.split("/") if not (name.startswith("v") and name[1:].isdigit())]
    return names[-1]


def _link_all(parts: list[Path], everything: Path) -> None:
    """Make one folder with links to all programs, and rename it into place when complete."""
    unfinished = everything.with_suffix(f".{os.getpid()}")
    unfinished.mkdir()
    for part in parts:
        for program in part.iterdir():
            (unfinished / program.name).symlink_to(program)
    unfinished.rename(everything)
