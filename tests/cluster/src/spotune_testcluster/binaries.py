"""Builds the programs of a test cluster, Helm and kubeconform from pinned Go modules, outside the checkout.

Two environment variables choose other versions: SPOTUNE_TESTCLUSTER_KUBERNETES=1.29 takes the programs of
`kubernetes/1.29`, and SPOTUNE_TESTCLUSTER_KUBERAY=1.5 those of `kuberay/1.5`. Such a folder has the go.mod of one
version, whose tools are the programs. All others are those of `binaries`.
"""

import fcntl
import hashlib
import os
import re
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
OPERATOR = "github.com/ray-project/kuberay/ray-operator"
CHOICES = {"kubernetes": "SPOTUNE_TESTCLUSTER_KUBERNETES", "kuberay": "SPOTUNE_TESTCLUSTER_KUBERAY"}
"""The environment variable that chooses a version, by the folder of all versions."""


def kubernetes_flags(version: str) -> str:
    """Linker flags by which the programs of Kubernetes know their version, such as v1.34.4."""
    parts = {
        "gitVersion": version,
        "gitMajor": "1",
        "gitMinor": version.split(".")[1],
        "gitTreeState": "clean",
    }
    return " ".join(["-s -w", *(f"-X {VERSION}.{name}={value}" for name, value in parts.items())])


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
            OPERATOR: "ray-operator",
            "./coredns": "coredns",
        },
        flags=kubernetes_flags(KUBERNETES),
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


def modules(environment: Mapping[str, str] = os.environ) -> tuple[Module, ...]:
    """The modules of a cluster, those of chosen versions last: their programs take the place of earlier ones.

    Raises:
        ClusterError: There is no such version.
    """
    chosen = {folder: environment.get(variable, "") for folder, variable in CHOICES.items()}
    return (*MODULES, *(other_version(f"{folder}/{version}") for folder, version in chosen.items() if version))


def other_version(folder: str) -> Module:
    """The module of another version: `kubernetes/1.29` or `kuberay/1.5`.

    Raises:
        ClusterError: There is no such version.
    """
    file = SOURCES / folder / "go.mod"
    if not file.is_file():
        known = sorted(path.parent.name for path in file.parent.parent.glob("*/go.mod"))
        raise ClusterError(f"there is no {folder}; versions besides that of `binaries`: {', '.join(known)}")
    text = file.read_text()
    packages = re.search(r"^tool \(\n(.*?)^\)", text, re.MULTILINE | re.DOTALL)
    tools = packages[1].split() if packages else re.findall(r"^tool (\S+)", text, re.MULTILINE)
    version = re.search(r"^\s*(?:require )?k8s\.io/kubernetes (v\S+)", text, re.MULTILINE)
    flags = kubernetes_flags(version[1]) if version else "-s -w"
    return Module(folder, {package: _go_name(package) for package in tools}, flags)


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
        parts = [_build_module(store, module, report) for module in modules()]
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
    return all(_target(home / "binaries", module).exists() for module in modules())


def kuberay_resources(folder: str = "binaries") -> Path:
    """The folder of KubeRay's custom resource definitions, a part of its Go module, at the version of our module."""
    command = ["go", "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", OPERATOR]
    found = subprocess.run(command, cwd=SOURCES / folder, capture_output=True, text=True, check=True)
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
        if OPERATOR in module.programs:
            shutil.copytree(kuberay_resources(module.folder), output / "kuberay-crds")
        output.rename(target)
    report(f"built in {time.monotonic() - began:.0f} s")
    return target


def _target(store: Path, module: Module) -> Path:
    return store / f"{module.folder.replace('/', '-')}-{module.key()}"


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
            link = unfinished / program.name
            link.unlink(missing_ok=True)  # the same program at the default version
            link.symlink_to(program)
    unfinished.rename(everything)
