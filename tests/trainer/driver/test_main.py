"""The command that starts a driver."""

from __future__ import annotations

import pytest

from spotune_trainer.driver.__main__ import main


def test_the_command_needs_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--attempt", "1"])
    assert exit_info.value.code == 2
    assert "--directory" in capsys.readouterr().err
