"""Faults of the operator and the API server. Training must not be affected."""

import random
import time

from tests.cluster.faults.harness import FaultHarness

_SEED = 20260
_LONGEST_PAUSE_SECONDS = 5.0
_SECONDS_CUT_OFF = 120.0


def operator_killed_at_random_moments(harness: FaultHarness, kills: int = 3) -> None:
    """Alternates `kill -9` of the process with deletion of the pod, because the kubelet backs off after crashes."""
    harness.machine("kill -9 of a container")
    pauses = random.Random(_SEED)
    with harness.expect_recovery():
        for number in range(kills):
            time.sleep(pauses.uniform(0, _LONGEST_PAUSE_SECONDS))
            if number % 2:
                harness.operator.delete_pod()
            else:
                harness.operator.kill()
        harness.operator.wait_until_ready()


def operator_down_while_the_head_is_lost(harness: FaultHarness) -> None:
    with harness.expect_recovery("headLost", continues=True) as injected, harness.without_operator():
        injected.mark_injected()
        lost = harness.job.progress()["restarts"]["headLost"]
        harness.delete([harness.job.head()])
        harness.job.wait_for_progress("the next head", lambda found: found["restarts"]["headLost"] > lost)


def api_server_restarted(harness: FaultHarness) -> None:
    with harness.expect_recovery():
        harness.fault.restart_api_server()


def operator_upgraded_and_rolled_back(harness: FaultHarness) -> None:
    """Upgrades by the chart: each revision starts another pod while training continues."""
    with harness.expect_recovery():
        harness.operator.install("podAnnotations.revision=next")
        harness.operator.roll_back()


def operator_cut_off_from_the_pods(harness: FaultHarness) -> None:
    """The operator cannot poll the supervisor. It reports Training Unknown and restarts nothing."""
    with harness.expect_recovery() as injected:
        with harness.operator.cut_off_from_pods():
            time.sleep(_SECONDS_CUT_OFF)
        seen = [one for one in harness.job.history.seen if one.time > injected.time]
        reasons = {one.condition("Training").get("reason") for one in seen}
        assert "SupervisorUnreachable" in reasons, f"Training was {reasons}"
