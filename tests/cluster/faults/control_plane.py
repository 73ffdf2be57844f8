"""The operator and the API server in trouble: training must not notice."""

import random
import time

from tests.cluster.faults.harness import Scene

_SEED = 20260
_LONGEST_PAUSE_SECONDS = 5.0
_SECONDS_CUT_OFF = 120.0


def operator_killed_at_random_moments(scene: Scene, kills: int = 3) -> None:
    """By turns `kill -9` of its process and the loss of its pod: the kubelet waits longer and longer for the former."""
    scene.machine("kill -9 of a container")
    moments = random.Random(_SEED)
    with scene.survives():
        for number in range(kills):
            time.sleep(moments.uniform(0, _LONGEST_PAUSE_SECONDS))
            if number % 2:
                scene.operator.delete_pod()
            else:
                scene.operator.kill()
        scene.operator.wait_until_ready()


def operator_down_while_the_head_is_lost(scene: Scene) -> None:
    with scene.survives("headLost") as strike, scene.without_operator():
        strike.falls_now()
        before = scene.job.progress()
        scene.delete([scene.job.head()])
        scene.job.wait_for_step(before["step"] + 1, before["generation"] + 1)


def api_server_restarted(scene: Scene) -> None:
    with scene.survives():
        scene.fault.restart_api_server()


def operator_upgraded_and_rolled_back(scene: Scene) -> None:
    """By the chart: another pod each time, while training goes on."""
    with scene.survives():
        scene.operator.install("podAnnotations.revision=next")
        scene.operator.roll_back()


def operator_cut_off_from_the_pods(scene: Scene) -> None:
    """It cannot tell how training goes, and says so; that is no reason to start anything again."""
    with scene.survives() as strike:
        with scene.operator.cut_off_from_pods():
            time.sleep(_SECONDS_CUT_OFF)
        seen = [one for one in scene.job.history.seen if one.time > strike.time]
        reasons = {one.condition("Training").get("reason") for one in seen}
        assert "SupervisorUnreachable" in reasons, f"Training was {reasons}"
