"""Unit tests of the test cluster's parts, without a cluster, Go or root."""

import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from spotune_testcluster import providers, requirements
from spotune_testcluster.binaries import MODULES, SOURCES, Module, modules, other_version
from spotune_testcluster.errors import CannotRunHereError, ClusterError, DidNotStartError, NotRunningError
from spotune_testcluster.home import Home
from spotune_testcluster.init import ask, process_id
from spotune_testcluster.pki import Authority
from spotune_testcluster.providers import Capacity, Provider
from spotune_testcluster.pytest_plugin import NotForTestsError, refuse_if_not_for_tests
from spotune_testcluster.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.every_parameter]

STUBBORN = "trap '' TERM; echo deaf; while true; do sleep 0.05; done"
SLEEPS_UNDER_AN_INIT = f"""
import sys
from pathlib import Path
from spotune_testcluster.init import Component, Init

folder = Path(sys.argv[1])
init = Init(folder / "control.sock")
init.add("sleeper", Component(["sleep", "600"], folder / "sleeper.log"))
init.add("stubborn", Component(["bash", "-c", {STUBBORN!r}], folder / "stubborn.log"))
init.run()
"""


@pytest.fixture
def init(tmp_path: Path) -> Iterator[Path]:
    """The socket of an init with two components, in a separate process."""
    socket = tmp_path / "control.sock"
    process = subprocess.Popen([sys.executable, "-c", SLEEPS_UNDER_AN_INIT, str(tmp_path)], start_new_session=True)
    wait_for("the init", 60, lambda: process_id(socket))
    ask(socket, "status")  # it listens before it starts the components, and answers afterwards
    yield socket
    for name in ("sleeper", "stubborn"):
        ask(socket, "stop", component=name)
    process.kill()
    process.wait()


def _starts(init: Path, name: str) -> int:
    count: int = ask(init, "status")[name]["starts"]
    return count


def test_component_that_dies_is_started_again(init: Path) -> None:
    (child,) = _children(init, "sleep 600")
    os.kill(child, signal.SIGKILL)
    wait_for("a second start", 60, lambda: _starts(init, "sleeper") == 2)


def test_stopped_component_stays_stopped_until_it_is_started(init: Path) -> None:
    ask(init, "stop", component="sleeper")
    assert ask(init, "status")["sleeper"] == {"running": False, "wanted": False, "starts": 1}
    ask(init, "start", component="sleeper")
    assert ask(init, "status")["sleeper"] == {"running": True, "wanted": True, "starts": 2}


def test_component_that_ignores_sigterm_is_killed(init: Path) -> None:
    log = init.with_name("stubborn.log")
    wait_for("its trap", 60, lambda: log.exists() and log.read_text() == "deaf\n")
    ask(init, "restart", component="stubborn")
    assert ask(init, "status")["stubborn"]["starts"] == 2


def test_unknown_component_and_operation_say_what_there_is(init: Path) -> None:
    with pytest.raises(ClusterError, match="there is no component 'etcd', only sleeper, stubborn"):
        ask(init, "stop", component="etcd")
    with pytest.raises(ClusterError, match="'dance' is not one of status, stop"):
        ask(init, "dance")


def test_init_that_is_not_there_is_not_running(tmp_path: Path) -> None:
    assert process_id(tmp_path / "control.sock") is None
    with pytest.raises(NotRunningError):
        ask(tmp_path / "control.sock", "status")


def _children(init: Path, command: str) -> list[int]:
    parent = process_id(init)
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(parent)], capture_output=True, text=True, check=True
    )
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if command in line]


def test_certificates_are_of_the_authority_and_for_their_user(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    authority.issue("server", "kube-apiserver", addresses=["127.0.0.1", "kubernetes.default"])
    kubeconfig = tmp_path / "kubeconfig"
    Authority(tmp_path / "pki").kubeconfig(kubeconfig, "testcluster", "https://127.0.0.1:1", "alice", "people")
    for certificate in ("server", "kubeconfig"):
        context = ssl.create_default_context(cafile=str(authority.certificate))
        context.load_cert_chain(tmp_path / f"pki/{certificate}.crt", tmp_path / f"pki/{certificate}.key")
    verified = subprocess.run(
        ["openssl", "verify", "-CAfile", tmp_path / "pki/ca.crt", tmp_path / "pki/server.crt"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert verified.stdout.strip().endswith("OK")
    config = yaml.safe_load(kubeconfig.read_text())
    assert config["contexts"] == [{"name": "testcluster", "context": {"cluster": "testcluster", "user": "alice"}}]
    assert kubeconfig.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("context", ["spotune-testcluster", "kind-spotune", "aks-e2e", "TEST", "my_ci_cluster"])
def test_context_that_says_it_is_for_tests_is_taken(context: str) -> None:
    refuse_if_not_for_tests(context)


@pytest.mark.parametrize("context", ["production", "contest", "latest", "aks-weu-01", "mankind"])
def test_context_that_does_not_say_so_is_refused(context: str) -> None:
    with pytest.raises(NotForTestsError, match=f"'{context}' does not say that it is for tests"):
        refuse_if_not_for_tests(context)


@pytest.mark.parametrize("provider", [provider for provider in Provider if provider is not Provider.NONE])
def test_spot_nodes_differ_from_on_demand_nodes(provider: Provider) -> None:
    spot = providers.labels(provider, Capacity.SPOT, 0)
    assert spot
    assert spot != providers.labels(provider, Capacity.ON_DEMAND, 0)


def test_key_of_a_module_follows_what_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotune_testcluster.binaries.SOURCES", tmp_path)
    (tmp_path / "go").mkdir()
    (tmp_path / "go/go.sum").write_text("one")
    module = Module("go", {"./a": "a"})
    first = module.key()
    assert module.key() == first
    assert Module("go", {"./b": "b"}).key() != first
    (tmp_path / "go/go.sum").write_text("two")
    assert module.key() != first


def test_every_program_is_built_once() -> None:
    names = [name for module in MODULES for name in module.programs.values()]
    assert len(names) == len(set(names))
    assert {"kube-apiserver", "kubelet", "etcd", "ray-operator", "helm"} <= set(names)


def test_chosen_versions_replace_programs() -> None:
    assert modules({}) == MODULES
    chosen = modules({"SPOTUNE_TESTCLUSTER_KUBERNETES": "1.29", "SPOTUNE_TESTCLUSTER_KUBERAY": "1.5"})
    assert [module.folder for module in chosen[len(MODULES) :]] == ["kubernetes/1.29", "kuberay/1.5"]
    known = {name for module in MODULES for name in module.programs.values()}
    for folder in SOURCES.glob("ku*/*/go.mod"):
        module = other_version(str(folder.parent.relative_to(SOURCES)))
        assert set(module.programs.values()) <= known
        assert module.folder.startswith("kuberay") or f"gitVersion=v{folder.parent.name}." in module.flags


def test_unknown_version_names_the_known_ones() -> None:
    with pytest.raises(ClusterError, match=r"there is no kubernetes/1\.2; .*1\.29"):
        other_version("kubernetes/1.2")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda program, path="": None if program == "runc" else program)
    monkeypatch.setattr(requirements, "BRIDGE_PLUGIN", Path("/nowhere"))
    with pytest.raises(CannotRunHereError, match=r"apt-get install .* containernetworking-plugins runc$"):
        requirements.check()


def test_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(CannotRunHereError, match="as root"):
        requirements.check()


def test_waiting_in_vain_names_what_was_waited_for() -> None:
    with pytest.raises(DidNotStartError, match="the moon: not seen within 0 s"):
        wait_for("the moon", 0, lambda: None)


@pytest.mark.parametrize("name", ["", "Upper", "../etc", "a" * 40])
def test_bad_cluster_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="is no name for a cluster"):
        Home(tmp_path).cluster(name)


def test_home_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPOTUNE_TESTCLUSTER_HOME", str(tmp_path))
    assert Home.default().cluster("a").node("n1").root == tmp_path / "clusters/a/nodes/n1"
