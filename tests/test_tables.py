"""The tables of the pages say what the rows say. Numbers were wrong beside their rows once, and 47 had none."""

import io

import pytest
from cogapp import Cog

from tests import tables
from tests.launch import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "results" / "study_calibration" / "README.md"]


@pytest.mark.parametrize("page", [page for page in PAGES if "[[[cog" in page.read_text()], ids=lambda page: page.name)
def test_a_page_has_the_tables_that_its_rows_give(page):
    cog, said = Cog(), io.StringIO()
    cog.set_output(stdout=said, stderr=said)
    assert cog.main(["cog", "--check", "--diff", "-P", "-I", str(ROOT), str(page)]) == 0, said.getvalue()


def test_the_address_of_the_project_is_written_once(tmp_path, capsys):
    (tmp_path / "tour.ipynb").write_text(r'"URL = \"https://github.com/me/it\"  # of the project"')
    tables.in_a_browser(tmp_path / "tour.ipynb")
    said = capsys.readouterr().out
    assert "/github/me/it/blob/main/docs/tour.ipynb)" in said and "(https://codespaces.new/me/it)" in said
