"""The base images: a Debian with the libraries of Python and Ray, and the pause container of every pod.

Debian is installed from this machine's apt sources, in this machine's release, because the interpreter in the layer
above was built against its libraries.
"""

import platform
from pathlib import Path

from spotune_testcluster.commands import ALONE, run
from spotune_testcluster.errors import CannotRunHereError

PACKAGES = (
    "ca-certificates",
    "curl",
    "git",
    "iproute2",
    "libbz2-1.0",
    "libexpat1",
    "libffi8",
    "libgomp1",
    "liblzma5",
    "libncursesw6",
    "libreadline8",
    "libsqlite3-0",
    "libssl3",
    "libuuid1",
    "procps",
    "zlib1g",
)
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/man/*")
# Remove files of this machine. Ray and PyTorch look up the name of their user, so 1000 needs one.
AFTERWARDS = (
    'rm -f "$1"/etc/apt/sources.list "$1"/etc/apt/apt.conf.d/99mmdebstrap "$1"/etc/hostname "$1"/etc/resolv.conf',
    'chroot "$1" useradd --uid 1000 --create-home trainer',
)
PAUSE_SOURCE = Path(__file__).with_name("pause.c")


def base_content() -> tuple[str, ...]:
    """Everything that determines the content of the base layer."""
    release = platform.freedesktop_os_release()
    return (release["ID"], release["VERSION_CODENAME"], platform.machine(), *PACKAGES, *LEFT_OUT, *AFTERWARDS)


def make_base_layer(folder: Path) -> None:
    """Write `folder`/layer.tar, an installed Debian of about 150 MB (20 s).

    Raises:
        CannotRunHereError: apt has no package lists of the release.
        ClusterError: The installation failed; the message has its output.
    """
    settings = folder / "apt.conf"
    settings.write_text(_apt_settings())
    run(
        [
            *(*ALONE, "env", f"TMPDIR={folder}"),
            *("mmdebstrap", "--quiet", "--mode=root", "--variant=minbase"),
            f"--aptopt={settings}",
            *(f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT),
            f"--include={','.join(PACKAGES)}",
            *(f"--customize-hook={command}" for command in AFTERWARDS),
            platform.freedesktop_os_release()["VERSION_CODENAME"],
            str(folder / "layer.tar"),
            *_apt_sources(),
        ],
        "installing a Debian for the base image",
    )
    settings.unlink()


def compile_pause(program: Path) -> None:
    """Compile the pause program, statically linked because its image has no other file."""
    run(["gcc", "-static", "-O2", "-s", "-o", str(program), str(PAUSE_SOURCE)], "compiling pause.c")


def _apt_settings() -> str:
    """How this machine's apt reaches its sources, for example proxies and disabled date checks."""
    lines = run(["apt-config", "dump"], "reading apt's settings").splitlines()
    generated = ("Acquire::IndexTargets", "Acquire::Changelogs")
    return "".join(f"{line}\n" for line in lines if line.startswith("Acquire::") and not line.startswith(generated))


def _apt_sources() -> list[str]:
    """The apt sources of the release itself, without third-party sources."""
    entry = "deb $(REPO_URI) $(RELEASE) $(COMPONENT)"
    origin = platform.freedesktop_os_release()["ID"].capitalize()
    command = ["apt-get", "indextargets", "--format", entry, "Identifier: Packages", f"Origin: {origin}"]
    sources = run(command, "reading apt's sources").splitlines()
    if not sources:
        raise CannotRunHereError(f"apt has no package lists of {origin}: run apt-get update")
    return sorted(set(sources))
