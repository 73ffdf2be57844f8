"""Takes docs/images/serve.png: the page of a served model in headless Chromium, after it has answered a question.

    apt-get install chromium
    make demo
    python -m docs.screenshot runs/text-to-sql

Fonts differ between machines, so `make manifests` does not run it. Run it again after a change of the page.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

from tests.serve.support.browser import Browser
from tests.serve.support.live_service import LiveService

PICTURE: Final = Path(__file__).parent / "images/serve.png"
ANSWERED: Final = "!byId('send').disabled && byId('meta').textContent"
"""JavaScript on the page: the answer is complete."""
_QUESTION: Final = {
    "question": "How many ferries have a speed above 30?",
    "columns": "ferry captain speed year",
}


def take(run: Path, picture: Path) -> None:
    """Serve the model of a run, ask it through the page, and save the page as a PNG.

    Args:
        run: directory of a run of examples/text-to-sql.
        picture: where to save it.
    """
    with LiveService(run) as service, Browser() as browser:
        for _ in range(2):  # the first question includes the model's first use
            browser.open(f"{service.url}/?{urlencode({**_QUESTION, 'ask': 1})}")
            browser.wait_for(ANSWERED)
        picture.write_bytes(browser.screenshot())


if __name__ == "__main__":
    take(Path(sys.argv[1]), PICTURE)
