"""Documentation site: complete navigation, complete generated pages, and valid links."""

import json
import re
import statistics
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from megatron.config.load import load_config
from megatron.config.schema import SECTIONS, list_config_keys
from megatron.position import registry
from megatron.reports.records import read_records
from tools.site import api_pages, key_pages, method_pages, search_order
from tools.site.formulas import METHOD_FORMULAS, Formula, convert_formulas
from tools.site.generated_pages import RESULTS, GeneratedPages, build_link_rewriter
from tools.site.links import REPOSITORY_FACTS, LinkRewriter, list_loaded_urls
from tools.site.markdown import escape, link_docs
from tools.site.method_results import RECORD
from tools.site.source_pages import render_source_page

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generated() -> GeneratedPages:
    return GeneratedPages(ROOT)


def list_pages(entries: list) -> list[str]:
    """Return the pages of a navigation, in order."""
    pages = []
    for entry in entries:
        values = list(entry.values()) if isinstance(entry, dict) else [entry]
        pages += [page for value in values for page in (list_pages(value) if isinstance(value, list) else [value])]
    return pages


def test_navigation_has_every_page_once(generated: GeneratedPages) -> None:
    navigation = YAML().load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = list_pages(generated.expand_navigation(navigation))
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    notebooks = {
        path.relative_to(ROOT / "docs").with_suffix(".md").as_posix() for path in ROOT.glob("docs/notebooks/*")
    }
    made = {path for path in generated.contents if path.endswith(".md")}
    assert sorted(pages) == sorted(docs | made | notebooks)


def test_results_and_methods_are_grouped_under_titles_of_their_own(generated: GeneratedPages) -> None:
    for folder in ("results", "methods"):
        groups = [(title, pages) for entry in generated.folders[folder] for title, pages in entry.items()]
        assert all(isinstance(pages, list) for _, pages in groups), "a page is in no group"
        titles = [title for _, pages in groups for page in pages for title in page]
        assert len(set(titles)) == len(titles)
    assert set(RESULTS) == {title for entry in generated.folders["results"] for title in entry}
    assert {"kerple_log": "methods/kerple_log.md"} in generated.folders["methods"][0]["Encodings"]
    assert {"cdape": "methods/cdape.md"} in generated.folders["methods"][1]["Processors"]
    assert generated.folders["methods"][2]["Temperatures"] == [
        {name: f"methods/{name}.md"} for name in registry.list_temperatures()
    ]


def test_reports_link_back_to_the_site(generated: GeneratedPages) -> None:
    for page in ("results/zoo_page.html", "results/small_page.html"):
        text = generated.contents[page]
        assert '<a href="../index.html">' in text.partition("<h1")[0]


def test_every_command_has_a_page_with_its_options(generated: GeneratedPages) -> None:
    from typer.main import get_command

    from megatron.cli.app import app
    from megatron.cli.help_page import list_shown_flags

    commands = get_command(app).commands
    index = generated.contents["commands/index.md"]
    for name, command in commands.items():
        page = generated.contents[f"commands/{name}.md"]
        assert f"./deepy.py {name} " in page
        assert f"]({name}.md)" in index
        options = [option for parameter in command.params for option in list_shown_flags(parameter)]
        assert [option for option in options if option not in page] == []
    assert sum(path.startswith("commands/") for path in generated.contents) == len(commands) + 1


def test_options_describe_types_limits_and_defaults(generated: GeneratedPages) -> None:
    evaluate = generated.contents["commands/evaluate.md"]
    assert "`--num-windows` · integer · at least 1\n:   Windows per length;" in evaluate
    assert "`--protocol` · text · default `last`\n" in evaluate
    assert "`--vocab-size` · integer · 257 to 16,777,216\n" in generated.contents["commands/prepare.md"]
    pages = [page for path, page in generated.contents.items() if path.startswith("commands/")]
    assert not [page for page in pages if "bold" in page], "marks of the terminal"
    assert not [
        words for page in pages for words in re.findall(r"<(?:int|str|float|path|list)[^>]*>|x[<>]=|\[default", page)
    ]


def test_examples_are_blocks_of_code(generated: GeneratedPages) -> None:
    page = generated.contents["commands/report.md"]
    block = re.search(r"## Examples\n\n``` console\n(.*?)\n```", page, flags=re.DOTALL)
    assert block is not None
    assert block[1].splitlines()[0] == "./deepy.py report runs/quickstart --against kerple_log"
    assert "[bold]" not in page


def test_every_key_has_a_heading_on_its_section_page(generated: GeneratedPages) -> None:
    for key in list_config_keys().values():
        path = f"keys/{key.section}.md"
        meaning = link_docs(escape(key.doc), path)
        assert f"`{key.name}` {{ #{key.name} }}\n\n{meaning}\n\n" in generated.contents[path]
    weight_decay = generated.contents["keys/optimizer.md"].partition("{ #weight_decay }")[2].partition("\n## ")[0]
    policy = "[numerics](../configuration.md#policies): a resumed run reports a change"
    assert f"\ntype: number · default: `0.1` · {policy}\n" in weight_decay
    for path, section in key_pages.SWEEP.items():
        for name in section.model_fields:
            assert f"{{ #{path}.{name} }}" in generated.contents["keys/sweep.md"]


def test_configuration_page_links_to_what_replaces_its_tables(generated: GeneratedPages) -> None:
    configuration = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    page = key_pages.shorten_configuration(configuration)
    headings = re.findall(r"^## .*", configuration, flags=re.MULTILINE)
    assert re.findall(r"^## .*", page, flags=re.MULTILINE) == headings, "anchors are kept"
    assert "num_layers" not in page
    assert page.count("{ #policies }") == 1
    linked = set(re.findall(r"\]\((keys/[^)]+)\)", page))
    assert linked == {path for path in generated.contents if path.startswith("keys/")}
    assert len(linked) == len(SECTIONS) + 2
    neox = configuration.partition("## GPT-NeoX")[2]
    rows = {link_docs(line, "keys/gpt-neox.md") for line in neox.splitlines() if line.startswith("|")}
    assert rows <= set(generated.contents["keys/gpt-neox.md"].splitlines())


def test_python_reference_names_existing_modules() -> None:
    for page in api_pages.list_api_pages(ROOT).values():
        for module in page.modules:
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), module


@pytest.mark.parametrize(
    ("source", "page", "target", "link"),
    [
        ("README.md", "about.md", "docs/data.md#after-training", "data.md#after-training"),
        ("README.md", "about.md", "docs/results/quickstart.png", "results/quickstart.png"),
        ("README.md", "about.md", "CONTRIBUTING.md", "contributing.md"),
        ("README.md", "about.md", "megatron/kernels/", "kernels/index.md"),
        ("docs/results/README.md", "results/README.md", "../../README.md", "../about.md"),
        ("docs/results/README.md", "results/README.md", "small.html", "small_page.html"),
        ("docs/results/README.md", "results/README.md", "zoo.html", "zoo_page.html"),
        ("docs/gpu.md", "gpu.md", "parallel.md", "parallel.md"),
        ("docs/gpu.md", "gpu.md", "../megatron/kernels/bias/README.md", "kernels/bias.md"),
        ("megatron/kernels/bias/README.md", "kernels/bias.md", "../../../docs/results/muon.md", "../results/muon.md"),
        ("docs/tasks.md", "tasks.md", "../configs/quickstart.yml", "source/configs/quickstart.yml.md"),
        ("docs/tasks.md", "tasks.md", "../configs/task/", "source/configs/task/index.md"),
        ("docs/tasks.md", "tasks.md", "../configs/nothing.yml", "../configs/nothing.yml"),
        ("docs/tasks.md", "tasks.md", "../../elsewhere.md", "../../elsewhere.md"),
        ("docs/tasks.md", "tasks.md", "https://arxiv.org/abs/2205.09921", "https://arxiv.org/abs/2205.09921"),
        ("docs/tasks.md", "tasks.md", "#probes", "#probes"),
        ("docs/from_neox.md", "from_neox.md", "configuration.md#not-supported", "keys/gpt-neox.md#not-supported"),
        ("docs/from_neox.md", "from_neox.md", "configuration.md#model", "configuration.md#model"),
    ],
)  # fmt: skip
def test_links_lead_to_pages(generated: GeneratedPages, source: str, page: str, target: str, link: str) -> None:
    rewriter = build_link_rewriter(generated, "")
    assert rewriter.rewrite(f"a [b]({target}), c", source, page) == f"a [b]({link}), c"


def test_no_two_files_of_the_site_have_one_name(generated: GeneratedPages) -> None:
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*") if path.is_file()}
    names = [*docs - set(generated.moved), *set(generated.contents) - docs]
    built = [re.sub(r"\.(md|ipynb)$", ".html", re.sub(r"README\.md$", "index.md", name)) for name in names]
    assert sorted(built) == sorted(set(built))


def test_files_that_no_page_shows_are_linked_to_the_repository_on_the_web(generated: GeneratedPages) -> None:
    rewriter = build_link_rewriter(generated, "https://example.org/far/blob/main")
    text = rewriter.rewrite("[a](../configs/zoo.yml) [b](data.md)", "docs/tasks.md", "tasks.md")
    assert text == "[a](https://example.org/far/blob/main/configs/zoo.yml) [b](data.md)"
    assert rewriter.source_files == set()


def test_code_is_no_link() -> None:
    rewriter = LinkRewriter(ROOT, {"README.md": "about.md"})
    code = "```\n[a](../README.md)\n```\n`[a](../README.md)` and ``x`[a](../README.md)``"
    assert rewriter.rewrite(code, "docs/data.md", "data.md") == code
    assert rewriter.rewrite("[`a`](../README.md)", "docs/data.md", "data.md") == "[`a`](about.md)"


@pytest.mark.parametrize(
    ("html", "urls"),
    [
        ('<script src="https://unpkg.com/iframe-worker/shim"></script>', ["https://unpkg.com/iframe-worker/shim"]),
        ('<img alt="a > b" src=//example.org/a.png>', ["//example.org/a.png"]),
        ('<link href="https://example.org/a.css" rel="stylesheet">', ["https://example.org/a.css"]),
        ('<link rel=preconnect href="https://example.org">', ["https://example.org"]),
        ("<style>@import 'https://example.org/a.css'; b {src: url(https://example.org/b.woff)}</style>",
         ["https://example.org/a.css", "https://example.org/b.woff"]),
        ('<a href="https://github.com/a/b" data-md-component="source">', ["https://github.com/a/b"]),
        ('<img srcset="a.png 1x, https://example.org/b.png 2x"><link rel="manifest" href="//example.org/m.json">',
         ["https://example.org/b.png", "//example.org/m.json"]),
        ('<svg><image href="https://example.org/a.svg"/><use xlink:href="https://example.org/b.svg#b"/></svg>',
         ["https://example.org/a.svg", "https://example.org/b.svg#b"]),
        ('<script src="../assets/iframe-worker.js"></script><img src="images/a.png"><a href="a.md">', []),
        ('<a href="https://github.com/a/b" data-md-component="source">'.replace(REPOSITORY_FACTS, ""), []),
        ('<a href="https://arxiv.org/abs/2205.09921">x</a><link rel="canonical" href="https://example.org/">', []),
        ('<svg xmlns="http://www.w3.org/2000/svg"><use href="#a"/></svg>', []),
    ],
)  # fmt: skip
def test_network_requests_of_pages_are_detected(html: str, urls: list[str]) -> None:
    assert list_loaded_urls(html) == urls


def test_the_search_has_its_script_from_the_site(generated: GeneratedPages) -> None:
    """The search script comes from the site; without a file of this name the offline plugin adds a network URL."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (path,) = YAML().load(settings)["extra"]["polyfills"]
    assert "iframe-worker" in path
    assert b"IFrameWorker" in generated.contents[path]
    assert b"Permission is hereby granted" in generated.contents[path]


def test_source_pages_show_files_and_folders() -> None:
    text = (ROOT / "configs/quickstart.yml").read_text(encoding="utf-8").rstrip()
    assert text in render_source_page(ROOT, "configs/quickstart.yml")
    assert "- `mqar.yml`\n" in render_source_page(ROOT, "configs/task")


def test_words_of_the_code_become_markdown() -> None:
    assert escape("a_b * <c> [d] `e_f`") == r"a\_b \* &lt;c> \[d\] `e_f`"
    assert link_docs("see docs/gpu.md and `docs/data.md`", "keys/model.md") == "see [gpu](../gpu.md) and `docs/data.md`"


def test_every_method_has_a_page(generated: GeneratedPages) -> None:
    names = [name for list_methods, _ in method_pages.KINDS.values() for name in list_methods()]
    assert sorted(names) == sorted(Path(p).stem for p in generated.contents if p.startswith("methods/"))
    positions = (ROOT / "docs/positions.md").read_text(encoding="utf-8")
    shortened = method_pages.shorten_positions(positions)
    assert re.findall("^#.*", shortened, flags=re.MULTILINE) == re.findall("^#.*", positions, flags=re.MULTILINE)
    records = registry.describe_methods(names)[0]
    for record in records:
        page = generated.contents[f"methods/{record['name']}.md"]
        assert f"$$\n{METHOD_FORMULAS[record['name']].latex}\n$$" in page
        unlinked = re.sub(r"\[([^\]]*)\]\(https://arxiv.org/abs/[\d.]+\)", r"\1", page)
        assert " ".join(record["source"].split()) in " ".join(unlinked.split())
        assert f"![{record['name']}: " in page
        for image in re.findall(r"\]\((\.\./images/[^)]+)\)", page):
            assert (ROOT / "docs/methods" / image).resolve().is_file()
        assert f"[More](methods/{record['name']}.md)" in shortened
        assert f"    {record['formula']}\n" not in shortened
        cell = record["formula"].replace("|", "\\|")
        assert f"| [`{record['name']}`](methods/{record['name']}.md)<br>`{cell}` |" in shortened


def test_a_methods_page_has_its_rows_of_the_leaderboard(generated: GeneratedPages) -> None:
    """A method's page has its rows of the leaderboard's record with the baseline, and no rows of methods with similar
    names.
    """
    board = (ROOT / "docs/results/zoo.md").read_text(encoding="utf-8")
    row = next(line for line in board.splitlines() if line.startswith("| cdape+kerple_log |"))
    perplexity = row.split(" | ")[2]
    for name in ("cdape", "kerple_log"):
        page = generated.contents[f"methods/{name}.md"]
        table = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
        heads = next(row for row in table if "cdape+kerple_log" in row)
        values = next((row for row in table if row[0] == "perplexity at 1×"), None)  # with methods as columns
        assert perplexity == (heads[2] if values is None else values[heads.index("cdape+kerple_log") + 1])
        assert any("rotary" in row for row in table)
    assert "kerple_log3" not in generated.contents["methods/kerple_log.md"].partition("## In the leaderboard")[2]
    assert "./deepy.py train 125M kerple_log local_setup" in generated.contents["methods/kerple_log.md"]


def test_perplexities_of_a_method_show_steps_and_seeds(generated: GeneratedPages) -> None:
    """A page states the budget of the leaderboard's record, and compares the methods that its advice names."""
    records = [record for record in read_records(ROOT / RECORD) if record.run is not None]
    text = [record for record in records if record.metric == "perplexity"]
    longest = max(record.length for record in text)
    values = {
        name: [record.value for record in text if (record.method, record.length) == (name, longest)]
        for name in ("rotary", "kerple_power", "kerple_log")
    }
    rotary = next(record for record in text if record.method == "rotary")
    page = generated.contents["methods/kerple_power.md"]
    assert f"is trained for {rotary.step} steps and evaluated on {rotary.dataset}; perplexities on" in page
    assert ("; needles and tasks have " in page) == (len(text) < len(records))
    row = next(line for line in page.splitlines() if line.startswith(("| perplexity at 32×", "| kerple_power |")))
    assert f"{statistics.fmean(values['kerple_power']):.2f}" in row
    assert (" (n " in row) == (len(values["kerple_power"]) < len(values["rotary"]))
    found = [
        f"{statistics.fmean(values[name]):.2f} for `{name}` ({len(values[name])} seed{'s' * (len(values[name]) > 1)})"
        for name in ("kerple_power", "kerple_log")
    ]
    assert " and ".join(found) in page, "its advice prefers kerple_log"
    assert ("a result of one seed" in page) == (1 in map(len, values.values()))
    assert "for `none`" not in generated.contents["methods/fope.md"], "there the word is no method"


def test_commands_of_methods_are_of_configurations_that_load(generated: GeneratedPages) -> None:
    """Commands on methods' pages are valid; a processor uses its published encoding, which the page names."""
    chosen = {}
    for path in (path for path in generated.contents if path.startswith("methods/")):
        (command,) = re.findall(r"^\./deepy\.py train (.*)$", generated.contents[path], flags=re.MULTILINE)
        position = load_config(command.split(), []).config.position
        name = Path(path).stem
        assert name in (position.encoding, position.processor, position.temperature)
        chosen[name] = position.encoding
        if name != position.encoding:
            assert f"It uses `{position.encoding}`, " in generated.contents[path]
    assert (chosen["cdape"], chosen["dape"], chosen["mta"]) == ("kerple_log", "kerple_log", "rotary")


def test_overlays_are_of_the_kind_of_their_method() -> None:
    """Overlays are listed under the kind of their method; `none` is an encoding, and the absence of other kinds."""
    overlays = method_pages.find_overlays(ROOT)
    assert overlays["none"].count("irope") == 1
    assert "cdape_kerple_log" in overlays["cdape"]
    assert "cdape_kerple_log" in overlays["kerple_log"]
    assert all(len(set(names)) == len(names) for names in overlays.values())


def test_sources_link_to_papers(generated: GeneratedPages) -> None:
    rotary = generated.contents["methods/rotary.md"]
    assert "[Su et al. 2021](https://arxiv.org/abs/2104.09864)" in rotary
    assert "[2212.10554](https://arxiv.org/abs/2212.10554)" in rotary
    assert "[arXiv:2504.00927](https://arxiv.org/abs/2504.00927)" in generated.contents["methods/mta.md"]
    without = {path for path, page in generated.contents.items() if path.startswith("methods/") and "arxiv" not in page}
    assert without == {"methods/learned.md", "methods/llama4.md", "methods/logn.md"}, "published elsewhere"


def test_formulas_in_latex_have_the_signs_of_the_plain_ones() -> None:
    """A method's LaTeX differs from its plain formula only in layout: fractions, roots, subscripts and products."""
    words = {name: name for name in ("ln", "max", "min", "log", "sin", "cos", "exp", "sinh")}
    words |= {"sum": "Σ", "le": "≤", "ge": "≥", "times": "×", "to": "→", "dots": "…", "ast": "∗"}
    words |= {"lvert": "|", "rvert": "|"}
    plain_signs = str.maketrans({"²": "2", "⁻": "-", "⁵": "5", "⁶": "6", "₂": "2", "−": "-", "¹": "1", "⁰": "0"})

    def strip_layout(text: str) -> str:
        return re.sub(r"[\s{}()\[\]/^_·√$\\,;`]", "", text)

    def read_latex(latex: str) -> str:
        return strip_layout(re.sub(r"\\([a-z]+)", lambda found: words.get(found[1], ""), latex))

    names = [name for list_methods, _ in method_pages.KINDS.values() for name in list_methods()]
    for record in registry.describe_methods(names)[0]:
        formula = METHOD_FORMULAS[record["name"]]
        plain = strip_layout(record["formula"].translate(plain_signs))
        assert read_latex(f"{formula.latex} {formula.words}") == plain, record["name"]
    assert set(METHOD_FORMULAS) <= set(names)


def test_latex_becomes_mathml_and_errors_name_the_page() -> None:
    pytest.importorskip("latex2mathml", reason="make site installs it")
    inline = r'<p>a <span class="arithmatex">\(n &lt; \frac{1}{2}\)</span></p>'
    html = convert_formulas(inline, "a.md")
    assert "<mfrac>" in html
    assert "arithmatex" not in html
    assert 'display="inline"' in html
    block = r'<div class="arithmatex">\['
    assert 'display="block"' in convert_formulas(rf"{block}n\]</div>", "a.md")
    with pytest.raises(ValueError, match=r"a\.md: .*nonsense"):
        convert_formulas(rf"{block}\nonsense n\]</div>", "a.md")
    assert Formula("n").to_markdown() == "$$\nn\n$$"


def test_guides_come_before_reference_and_the_log_last() -> None:
    boosts = [
        search_order.describe_for_search(page)["search"]["boost"]
        for page in ("training.md", "keys/training.md", "results/zoo.md", "api/model.md", "log.md")
    ]
    assert boosts == sorted(boosts, reverse=True)
    assert len(set(boosts)) == len(boosts)
    assert all((ROOT / "docs" / page).exists() for page in (*search_order.TAGS, search_order.LOG))


def test_the_search_index_is_asked(tmp_path: Path) -> None:
    pytest.importorskip("lunr", reason="make site installs it")
    documents = [
        {"location": "log.html", "title": "Log", "text": "resume resume resume", "boost": 0.02},
        {"location": "training.html", "title": "Training", "text": "how to resume", "tags": ["resume"], "boost": 4},
        {"location": "keys.html#resume", "title": "resume", "text": "", "boost": 0.5},
        {"location": "evaluation.html", "title": "Evaluation", "text": "length of extrapolation", "boost": 4},
    ]
    index = search_order.SearchIndex(documents)
    assert index.find_pages("resume") == ["training.html", "keys.html", "log.html"]
    assert index.find_pages("length extra") == ["evaluation.html"]
    assert index.find_pages("nowhere") == []
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "search_index.json").write_text(json.dumps({"docs": documents}))
    search_order.check_search_order(tmp_path, {"resume": "training.html"})
    with pytest.raises(ValueError, match=r"“resume” finds training\.html, .*, not log\.html"):
        search_order.check_search_order(tmp_path, {"resume": "log.html"})
