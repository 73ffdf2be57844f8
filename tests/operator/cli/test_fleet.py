"""`spotune fleet`: a table, JSON and a page of the jobs that a real HTTP server lists."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from spotune.cli.main import main
from spotune.errors import UsageError
from spotune_operator.cli import fleet
from tests.client.fleet.test_summary import JOBS
from tests.client.support.stateful_server import ROOT, serving_store


def test_table_json_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving_store(tmp_path) as (store, kubeconfig):
        for number, each in enumerate(JOBS):
            store.put(f"{ROOT}/namespaces/{each['metadata']['namespace']}/finetunejobs/{number}", each)

        def run(**options: Any) -> str:
            fleet.fleet(kubeconfig=kubeconfig, **options)
            return capsys.readouterr().out

        table = run(all_namespaces=True).splitlines()
        assert [line.split()[:2] for line in table[1:5]] == [["search", "2"], ["b", "1"], ["c", "1"], ["all", "4"]]
        assert table[-2] == "Not counted: deleted jobs, ModelServices."
        assert table[-1].startswith("1 of 4 jobs have no cost")
        assert json.loads(run(all_namespaces=True, output="json"))["total"]["gpuHours"]["onDemand"] == 1.0
        run(all_namespaces=True, output="html", file=tmp_path / "fleet.html")
        page = (tmp_path / "fleet.html").read_text()
        assert "<h1>Fleet</h1>" in page
        assert "Deleted jobs and ModelServices are not counted" in page
        assert run(namespace="empty") == "There are no FinetuneJobs in namespace empty.\n"
        with pytest.raises(UsageError, match="remove --namespace"):
            run(namespace="a", all_namespaces=True)


def test_closed_standard_output_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_store(tmp_path) as (store, kubeconfig):
        store.put(f"{ROOT}/namespaces/team/finetunejobs/a", JOBS[0])
        monkeypatch.setattr(sys, "stdout", None)
        with pytest.raises(SystemExit) as ended:
            main(["fleet", "--kubeconfig", str(kubeconfig)])
    sys.stdout.close()
    assert ended.value.code == 0
