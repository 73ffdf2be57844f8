"""Job files with pools that contradict each other or the rest of the job."""

from __future__ import annotations

from typing import Final

_WORKERS: Final = "  workers: {count: 2, min: 1}\n"
_PRICE: Final = "a price with its currency, such as 2.10 USD"


def _pools(*pools: str, more: str = "") -> str:
    return f"  workers: {{count: 4, min: 3, pools: [{', '.join(pools)}]{more}}}\n"


# (what is broken, text of the valid file, what is there instead, what is printed after the file's name)
WRONG_POOLS = [
    (f"pools: {name}", _WORKERS, text, f":10: spec.workers.{message}")
    for name, text, message in (
        (
            "price without a currency",
            _pools("{name: a, price: 2.10}"),
            f"pools[0].price: expected {_PRICE}, not 2.1",
        ),
        ("name of the head", _pools("{name: head}"), "pools[0].name: 'head' is the head's group: choose another name"),
        (
            "name with capitals",
            _pools("{name: A}"),
            (
                "pools[0].name: 'A' is not a valid Kubernetes name: use a-z, 0-9 and -, and start and end with a "
                "letter or digit"
            ),
        ),
        (
            "same name",
            _pools("{name: a}", "{name: a, zone: z}"),
            "pools[1].name: 'a' is the name of two pools: rename one of them",
        ),
        (
            "same nodes",
            _pools("{name: a, zone: z}", "{name: b, zone: z}"),
            (
                "pools[1]: b overlaps a: both have the same nodes (capacity, zone, gpuType and nodeSelector): remove "
                "one of them, or give it a selector of its own"
            ),
        ),
        (
            "currencies",
            _pools("{name: a, price: 1 USD}", "{name: b, zone: z, price: 1 EUR}"),
            "pools[1].price: 1 EUR and 1 USD of pool a have different currencies: use one for all pools",
        ),
        (
            "two zones",
            _pools("{name: a, zone: y, nodeSelector: {topology.kubernetes.io/zone: z}}"),
            (
                "pools[0].zone: contradicts nodeSelector, which has another topology.kubernetes.io/zone: "
                "remove one of them"
            ),
        ),
        (
            "fewer than the minimum",
            _pools("{name: a, max: 1}", "{name: b, zone: z, max: 1}"),
            "pools: carry 2 pods at most (the sum of max), fewer than min, 3: raise max",
        ),
        (
            "capacity of all workers",
            _pools("{name: a}", more=", capacity: on-demand"),
            "capacity: pools have a capacity each: remove workers.capacity, and set capacity of each pool",
        ),
        (
            "patience without pools",
            "  workers: {count: 4, poolPatience: 5m}\n",
            "poolPatience: is only used with pools: remove it, or set pools",
        ),
        (
            "zone that is no label",
            _pools("{name: a, zone: z 1}"),
            (
                "pools[0].zone: 'z 1' is not a valid value of a label: use letters, digits, -, _ and ., at most 63, "
                "and start and end with a letter or digit"
            ),
        ),
        (
            "too many",
            _pools(*(f"{{name: p{number}, zone: z{number}}}" for number in range(17))),
            "pools: expected a list of at most 16, not 17",
        ),
        (
            "more than a queue takes",
            _pools(*(f"{{name: p{number}, zone: z{number}}}" for number in range(8))) + "  cluster: {queueName: q}\n",
            "pools: Kueue takes 7 pools at most: remove some, or cluster.queueName",
        ),
        (
            "one worker cannot be left out",
            "  workers: {count: 1, onStraggler: replace}\n",
            "onStraggler: replace needs a min below count: otherwise no worker can be left out; lower workers.min",
        ),
        (
            "patience of spot-then-on-demand",
            _pools("{name: a}", more=", onDemandAfter: 1m"),
            "onDemandAfter: is not used with pools: remove it, and set poolPatience",
        ),
    )
]
WRONG_LIMITS = [
    (f"limits: {name}", _WORKERS, text, f":{message}")
    for name, text, message in (
        (
            "currency of another pool",
            _pools("{name: a, price: 1 USD}") + "  maxCost: 5 EUR\n",
            "11: spec.maxCost: 5 EUR has another currency than pool a, 1 USD: use one for both",
        ),
        (
            "priority without a queue",
            _WORKERS + "  cluster: {queuePriorityClass: low}\n",
            "11: spec.cluster.queuePriorityClass: is only used with queueName: remove it, or set queueName",
        ),
        (
            "queue that is no label",
            _WORKERS + "  cluster: {queueName: my queue}\n",
            (
                "11: spec.cluster.queueName: 'my queue' is not a valid value of a label: use letters, digits, -, _ "
                "and ., at most 63, and start and end with a letter or digit"
            ),
        ),
    )
]
