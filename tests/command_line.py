"""`spotune` as it is typed, in the process of the test."""

from __future__ import annotations

import pytest

from spotune.cli.main import main


def run_spotune(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `spotune` with these words."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err
