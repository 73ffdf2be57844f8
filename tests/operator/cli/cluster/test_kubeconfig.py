"""Kubeconfigs as people and clouds write them: found, chosen from, logged in with, or refused with a sentence."""

import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotune.errors import UsageError
from spotune_operator.cli.cluster.kubeconfig import Target, open_cluster
from spotune_operator.errors import KubernetesError

NOBODY = "https://127.0.0.1:1"
"""Where nothing listens."""


def kubeconfig(folder: Path, user: Any = None, **contexts: str) -> Path:
    """A kubeconfig with contexts by name, each with its namespace; the first one is the current one."""
    file = folder / "config"
    names = contexts or {"test": ""}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": next(iter(names)),
        "clusters": [{"name": "c", "cluster": {"server": NOBODY, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "u", "user": user or {"token": "secret"}}],
        "contexts": [
            {"name": name, "context": {"cluster": "c", "user": "u", **({"namespace": space} if space else {})}}
            for name, space in names.items()
        ],
    }
    file.write_text(yaml.safe_dump(content))
    return file


def login_program(folder: Path, script: str) -> dict[str, Any]:
    """A user whose kubeconfig logs in by a program, as those of the clouds do."""
    program = folder / "login"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    exec_section = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": str(program),
        "interactiveMode": "Never",
    }
    return {"exec": exec_section}


@pytest.fixture(autouse=True)
def _nobody_elses_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.mark.parametrize(
    ("contexts", "target", "namespace"),
    [
        ({"a": "team"}, Target(), "team"),
        ({"a": ""}, Target(), "default"),
        ({"a": "team", "b": "other"}, Target(context="b"), "other"),
        ({"a": "team"}, Target(namespace="mine"), "mine"),
    ],
)
def test_namespace_is_the_given_one_or_that_of_the_context(
    contexts: dict[str, str], target: Target, namespace: str, tmp_path: Path
) -> None:
    file = kubeconfig(tmp_path, **contexts)
    cluster = open_cluster(Target(target.namespace, file, target.context))
    assert (cluster.namespace, cluster.server) == (namespace, NOBODY)


def test_kubeconfig_is_found_where_kubectl_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = kubeconfig(tmp_path, a="team")
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'missing'}:{file}")
    assert open_cluster(Target()).namespace == "team"
    monkeypatch.delenv("KUBECONFIG")
    (tmp_path / "home" / ".kube").mkdir(parents=True)
    file.rename(tmp_path / "home" / ".kube" / "config")
    assert open_cluster(Target()).namespace == "team"


@pytest.mark.parametrize(
    ("content", "target", "message"),
    [
        (None, Target(), "there is no kubeconfig: neither $KUBECONFIG nor ~/.kube/config names a file that exists"),
        (None, Target(kubeconfig=Path("elsewhere")), "--kubeconfig elsewhere: there is no such file"),
        ("current-context: a", Target(), "config has no such context; there is none at all"),
        ("contexts: [{name: a}]", Target(), "config is not a kubeconfig that can be used: "),
        ("- a\n- b", Target(), "config is not a kubeconfig that can be used: "),
        ("a: [", Target(), "config is not a kubeconfig that can be used: "),
        ("", Target(), "config has no current context: give --context; there is none at all"),
    ],
    ids=["none", "missing", "no-contexts", "half", "list", "broken", "empty"],
)
def test_useless_kubeconfig_is_one_sentence(
    content: str | None, target: Target, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "config").write_text(content)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(UsageError) as caught:
        open_cluster(target)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_context_is_answered_with_the_nearest_one(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path, production="", staging="")
    with pytest.raises(UsageError, match=r"has no such context; did you mean production\?"):
        open_cluster(Target(kubeconfig=file, context="prodution"))
    with pytest.raises(UsageError, match="has no such context; there is production, staging"):
        open_cluster(Target(kubeconfig=file, context="x"))


def test_kubeconfig_without_a_current_context_asks_for_one(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path, a="", b="")
    file.write_text(file.read_text().replace("current-context: a", "current-context: ''"))
    with pytest.raises(UsageError, match="has no current context: give --context; there is a, b"):
        open_cluster(Target(kubeconfig=file))
    assert open_cluster(Target(kubeconfig=file, context="b")).namespace == "default"


def test_login_by_a_program_brings_its_token(tmp_path: Path) -> None:
    credential = (
        '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "fresh"}}'
    )
    user = login_program(tmp_path, f"echo '{credential}'")
    cluster = open_cluster(Target(kubeconfig=kubeconfig(tmp_path, user)))
    assert cluster.authorization() == {"authorization": "Bearer fresh"}


def test_login_program_that_fails_is_told_in_its_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    user = login_program(tmp_path, "echo 'token expired: run az login' >&2; exit 3")
    with pytest.raises(
        KubernetesError, match=r"context test: the login of .*config fails: .*token expired: run az login"
    ):
        open_cluster(Target(kubeconfig=kubeconfig(tmp_path, user)))
    assert capfd.readouterr().err == ""


def test_login_program_that_is_not_installed_is_named(tmp_path: Path) -> None:
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "kubelogin-of-nobody"}}
    with pytest.raises(KubernetesError, match=r"the login of .* fails: .*kubelogin-of-nobody"):
        open_cluster(Target(kubeconfig=kubeconfig(tmp_path, user)))


def test_server_that_nobody_runs_is_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cluster = open_cluster(Target(kubeconfig=kubeconfig(tmp_path)))
    with pytest.raises(KubernetesError, match=f"{NOBODY} does not answer .Connection refused.: is the cluster up"):
        cluster.get("/version")
    with pytest.raises(KubernetesError, match=f"{NOBODY} does not answer .Connection refused.: is the cluster up"):
        cluster.connect("pod", 8090)
    assert capfd.readouterr().err == ""
