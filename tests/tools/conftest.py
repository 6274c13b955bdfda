"""Fixtures of the tool tests."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def hotpot() -> Path:
    """The folder with the real question set; skipped with its reason where absent."""
    folder = ROOT.parent / "shared" / "data" / "hotpot"
    if not (folder / "corpus.jsonl").is_file():
        pytest.skip(f"the HotpotQA sample is not at {folder}")
    return folder
