"""Generated documentation is what the program says today."""

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "reference.py"
spec = importlib.util.spec_from_file_location("reference", TOOL)
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_is_up_to_date(name: str) -> None:
    written = (reference.DOCS / name).read_text(encoding="utf-8")
    assert written == reference.PAGES[name](written), "run: python tools/reference.py"
