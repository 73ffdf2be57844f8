"""Trains the text-to-SQL example in an empty cluster: images of the Dockerfile, `helm install`, `kubectl apply`.

Build the images first by `make images`, which takes long.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spotune_testcluster.containerd import load_image
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from tests import ROOT
from tests.cluster import chart, text_to_sql
from tests.cluster.chart import NAMESPACE
from tests.cluster.finetune_jobs import Workplace
from tests.cluster.operator_install import RESTRICTED
from tests.cluster.own_images import image_name

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(3600)]

ARCHIVES = ROOT / "build/images"
TARGETS = ("operator", "trainer")
"""The images that train. No node stores the one that serves."""
ROWS = 25600
STEPS = ROWS // 64


def test_example_is_trained_by_the_images_of_the_dockerfile_through_the_loss_of_its_head(
    cluster: ClusterUnderTest, workplace: Workplace, tmp_path: Path
) -> None:
    missing = [target for target in TARGETS if not (ARCHIVES / f"{target}.tar").exists()]
    if missing:
        pytest.skip(f"no {' and '.join(missing)} image: make images")
    machine = cluster.machine_for("loading images")
    nodes = cluster.nodes[:2]  # each node stores an image twice, which takes tens of gigabytes
    for name in nodes:
        for target in TARGETS:
            load_image(machine.way_in(name), ARCHIVES / f"{target}.tar")
    for name in cluster.nodes[2:]:
        cluster.kubectl("cordon", name)
    metadata = {"name": NAMESPACE, "labels": RESTRICTED}
    cluster.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    chart.install(cluster.kubectl, image_name("operator"))
    corpus = text_to_sql.write_corpus(tmp_path, ROWS)
    manifest = text_to_sql.manifest(workplace, every_steps=STEPS // 2, samples=16)
    del manifest["spec"]["cluster"]["image"]
    manifest["spec"]["checkpoint"] = {"every": 10}  # long before the last step
    with workplace.running(manifest) as job:
        job.move_to_own_volume(corpus, text_to_sql.ON_VOLUME)
        job.wait_for_commit()
        (image,) = {each["image"] for pod in job.pods("workers") for each in pod["spec"]["containers"]}
        assert image == image_name("trainer")
        job.kubectl("delete", "pod", job.head()["metadata"]["name"], "--wait=false")
        ended = job.wait_until_complete()
        assert ended.status["restarts"]["headLost"] == 1
        artifacts = job.artifacts(tmp_path)
    assert json.loads(artifacts.directory.result.read_text())["exportSha256"] == artifacts.sha256()
    chart.uninstall(cluster.kubectl)
    for name in cluster.nodes[2:]:
        cluster.kubectl("uncordon", name)
