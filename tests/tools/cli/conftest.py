"""A command to run in this interpreter, for all tests of this folder."""

import pytest

from tests.tools.cli.command import Command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command `crossshard`; a module that it imports stays, so each has a name of its own."""
    return Command(monkeypatch, capsys)
