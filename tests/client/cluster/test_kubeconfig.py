"""Kubeconfigs of users and clouds: found, selected, used to log in, or rejected with a clear error."""

import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotune.errors import KubernetesError, RefusedError, UsageError
from spotune_client.cluster.kubeconfig import ClusterOptions, open_cluster

NOBODY = "https://127.0.0.1:1"
"""An address on which nothing listens."""


def kubeconfig(folder: Path, user: Any = None, **contexts: str) -> Path:
    """Write a kubeconfig with contexts by name, each with its namespace; the first one is the current one."""
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
    """A kubeconfig user with a credential plugin, as those of the clouds."""
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
        ({"a": "team"}, ClusterOptions(), "team"),
        ({"a": ""}, ClusterOptions(), "default"),
        ({"a": "team", "b": "other"}, ClusterOptions(context="b"), "other"),
        ({"a": "team"}, ClusterOptions(namespace="mine"), "mine"),
    ],
)
def test_namespace_is_the_given_one_or_that_of_the_context(
    contexts: dict[str, str], target: ClusterOptions, namespace: str, tmp_path: Path
) -> None:
    file = kubeconfig(tmp_path, **contexts)
    cluster = open_cluster(ClusterOptions(target.namespace, file, target.context))
    assert (cluster.namespace, cluster.server) == (namespace, NOBODY)


def test_kubeconfig_is_found_where_kubectl_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = kubeconfig(tmp_path, a="team")
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'missing'}:{file}")
    assert open_cluster(ClusterOptions()).namespace == "team"
    monkeypatch.delenv("KUBECONFIG")
    (tmp_path / "home" / ".kube").mkdir(parents=True)
    file.rename(tmp_path / "home" / ".kube" / "config")
    assert open_cluster(ClusterOptions()).namespace == "team"


@pytest.mark.parametrize(
    ("content", "target", "message"),
    [
        (
            None,
            ClusterOptions(),
            "there is no kubeconfig: neither $KUBECONFIG nor ~/.kube/config is an existing file",
        ),
        (None, ClusterOptions(kubeconfig=Path("elsewhere")), "--kubeconfig elsewhere: the file does not exist"),
        ("current-context: a", ClusterOptions(), "config does not contain this context; available: none"),
        ("contexts: [{name: a}]", ClusterOptions(), "config is not a valid kubeconfig: "),
        ("- a\n- b", ClusterOptions(), "config is not a valid kubeconfig: "),
        ("a: [", ClusterOptions(), "config is not a valid kubeconfig: "),
        ("", ClusterOptions(), "config has no current context: use --context; available: none"),
        (b"\xff\xfe\x00", ClusterOptions(), "config is not a valid kubeconfig: 'utf-8' codec can't decode"),
        (None, ClusterOptions(kubeconfig=Path("/")), "--kubeconfig /: is no file"),
        (None, ClusterOptions(namespace="../.."), "--namespace ../..: this cannot be the name of a namespace"),
    ],
    ids=["none", "missing", "no-contexts", "half", "list", "broken", "empty", "binary", "folder", "namespace"],
)
def test_invalid_kubeconfig_is_a_one_line_error(
    content: str | bytes | None, target: ClusterOptions, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "config").write_bytes(content.encode() if isinstance(content, str) else content)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(UsageError) as caught:
        open_cluster(target)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (f"server: {NOBODY}", "server: cluster.example:6443", "does not begin with https://"),
        (f"server: {NOBODY}", "server: https://127.0.0.1:99999", "Failed to parse"),
        (f"server: {NOBODY}", f"server: {NOBODY}\n    proxy-url: nonsense", "Proxy URL had no scheme"),
        ("token: secret", "tokenFile: /nowhere", "/nowhere"),
    ],
)
def test_invalid_part_of_a_kubeconfig_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    file = kubeconfig(tmp_path)
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(UsageError, match=f"{file} is not a valid kubeconfig: .*{message}"):
        open_cluster(ClusterOptions(kubeconfig=file))


@pytest.mark.parametrize("token", ["a\nb", "\u20ac"])
def test_a_token_that_no_header_can_hold_is_an_error(token: str, tmp_path: Path) -> None:
    cluster = open_cluster(ClusterOptions(kubeconfig=kubeconfig(tmp_path, {"token": token})))
    with pytest.raises(RefusedError, match=r"the kubeconfig's token for .* has a line break or special characters"):
        cluster.get("/version")


def test_error_for_an_unknown_context_suggests_the_nearest_one(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path, production="", staging="")
    with pytest.raises(UsageError, match=r"does not contain this context; did you mean production\?"):
        open_cluster(ClusterOptions(kubeconfig=file, context="prodution"))
    with pytest.raises(UsageError, match="does not contain this context; available: production, staging"):
        open_cluster(ClusterOptions(kubeconfig=file, context="x"))


def test_error_without_a_current_context_asks_for_one(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path, a="", b="")
    file.write_text(file.read_text().replace("current-context: a", "current-context: ''"))
    with pytest.raises(UsageError, match="has no current context: use --context; available: a, b"):
        open_cluster(ClusterOptions(kubeconfig=file))
    assert open_cluster(ClusterOptions(kubeconfig=file, context="b")).namespace == "default"


def test_credential_plugin_provides_the_token(tmp_path: Path) -> None:
    credential = (
        '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "fresh"}}'
    )
    user = login_program(tmp_path, f"echo '{credential}'")
    cluster = open_cluster(ClusterOptions(kubeconfig=kubeconfig(tmp_path, user)))
    assert cluster.authorization() == {"authorization": "Bearer fresh"}


def test_error_of_a_credential_plugin_contains_its_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    user = login_program(tmp_path, "echo 'token expired: run az login' >&2; exit 3")
    with pytest.raises(
        KubernetesError, match=r"context test: the credential plugin of .*config failed: .*token expired: run az login"
    ):
        open_cluster(ClusterOptions(kubeconfig=kubeconfig(tmp_path, user)))
    assert capfd.readouterr().err == ""


def test_error_when_a_token_is_renewed_is_one_error_and_not_a_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expired = (
        '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", '
        '"status": {"token": "old", "expirationTimestamp": "2026-01-01T00:00:00Z"}}'
    )
    once = f"if [ -e {tmp_path}/once ]; then echo 'run az login' >&2; exit 3; fi; touch {tmp_path}/once"
    user = login_program(tmp_path, f"{once}; echo '{expired}'")
    cluster = open_cluster(ClusterOptions(kubeconfig=kubeconfig(tmp_path, user)))
    with pytest.raises(KubernetesError, match=f"the credential plugin for {NOBODY} failed: .*run az login") as caught:
        cluster.get("/version")
    assert not isinstance(caught.value, RefusedError)
    assert capfd.readouterr().err == ""


def test_missing_credential_plugin_is_named(tmp_path: Path) -> None:
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "kubelogin-of-nobody"}}
    with pytest.raises(KubernetesError, match=r"the credential plugin of .* failed: .*kubelogin-of-nobody"):
        open_cluster(ClusterOptions(kubeconfig=kubeconfig(tmp_path, user)))


def test_unreachable_server_is_a_one_line_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cluster = open_cluster(ClusterOptions(kubeconfig=kubeconfig(tmp_path)))
    with pytest.raises(
        KubernetesError, match=f"{NOBODY} does not answer .Connection refused.. Check that the cluster is up"
    ):
        cluster.get("/version")
    with pytest.raises(
        KubernetesError, match=f"{NOBODY} does not answer .Connection refused.. Check that the cluster is up"
    ):
        cluster.connect("pod", 8090)
    assert capfd.readouterr().err == ""
