"""Every work that the project asks to cite names its authors and venue."""

from megatron.reports.html_page import read_citation, render_bibtex


def test_every_reference_names_people_and_an_identifier():
    for work in read_citation()["references"]:
        assert all({"family-names", "given-names"} <= author.keys() for author in work["authors"]), work["title"]
        assert "conference" in work or "journal" in work, work["title"]
        assert "doi" in work or "arXiv" in work.get("notes", ""), work["title"]


def test_dape_v2_is_cited_as_published():
    bibtex = render_bibtex(read_citation())
    entry = next(part for part in bibtex.split("\n\n" if "\n\n" in bibtex else "\n@") if "DAPE V2" in part)
    assert "zheng2025dape" in entry
    assert "doi = {10.18653/v1/2025.acl-long.522}" in entry
    assert entry.count(" and ") == 11  # twelve authors
