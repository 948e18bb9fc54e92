"""Order of the search results: boosts favor guides over results and reference, and all of them over the log.

The site's search multiplies the score of a page by its boost, and shows its tags. `check_search_order` asks the built
index some questions of readers, with the analyzers of lunr, which the site's search uses.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOG = "log.md"
BOOSTS = {"api": 0.2, "commands": 1.0, "keys": 0.5, "kernels": 0.3, "notebooks": 2.0, "results": 0.3}
"""Boosts of the pages of a folder."""
PAGE_BOOSTS = {
    **{LOG: 0.02, "about.md": 0.5, "architecture.md": 0.5, "contributing.md": 0.5, "configuration.md": 1.0},
    **{"card.md": 1.0, "claims.md": 1.0, "gallery.md": 1.0, "reading.md": 0.5},
}
GUIDE_BOOST = 4.0
"""Boost of all other pages of docs/, the guides."""
TAGS = {
    "evaluation.md": ["length extrapolation", "leaderboard", "LaTeX table"],
    "training.md": ["resume", "resuming", "checkpoint"],
    "data.md": ["tokenizer"],
    "schedules.md": ["learning rate"],
    "stability.md": ["loss spike"],
    "monitoring.md": ["wandb", "TensorBoard"],
    "planning.md": ["out of memory"],
    "parallel.md": ["multi GPU", "context parallel", "tensor parallel"],
    "export.md": ["export to transformers", "Hugging Face"],
    "from_neox.md": ["GPT-NeoX", "GPT-NeoX checkpoint"],
    "optimizers.md": ["muP", "Muon"],
    "on_your_cluster.md": ["SLURM", "Docker", "NGC container"],
}
"""Search terms of readers that do not occur in the headings of the guide that answers them."""
QUESTIONS = {
    "length extrapolation": "evaluation.html",
    "resume": "training.html",
    "FoX": "methods/fox.html",
    "export to transformers": "export.html",
    "GPT-NeoX": "from_neox.html",
    "muP": "optimizers.html",
    "tutorial": "tutorial.html",
    "leaderboard": "evaluation.html",
    "learning rate": "schedules.html",
    "tokenizer": "data.html",
    "out of memory": "planning.html",
    "multi GPU": "parallel.html",
    "SLURM": "on_your_cluster.html",
    "loss spike": "stability.html",
    "LaTeX table": "evaluation.html",
    "NGC container": "on_your_cluster.html",
    "GPT-NeoX checkpoint": "from_neox.html",
}
"""Questions of readers, and the page that must be the first answer."""


def describe_for_search(page: str) -> dict[str, Any]:
    """Return the search metadata of a page that does not describe a method.

    Args:
        page: path of the page in the site's docs/.
    """
    folder, _, name = page.rpartition("/")
    boost = BOOSTS.get(folder.partition("/")[0], GUIDE_BOOST) if name and folder else PAGE_BOOSTS.get(page, GUIDE_BOOST)
    return {"search": {"boost": boost}, **({"tags": TAGS[page]} if page in TAGS else {})}


class SearchIndex:
    """Search index of a built site, asked as the site's search does.

    Titles count a thousand times as much as text, and tags a million times. The score of a page is the largest of its
    sections and of its whole text, which counts twice if it contains all words of the question. The last word of a
    question may be incomplete.

    Args:
        documents: `docs` of search/search_index.json.
    """

    def __init__(self, documents: list[dict[str, Any]]) -> None:
        import lunr

        fields = [{"field_name": "title", "boost": 1000}, "text", {"field_name": "tags", "boost": 1_000_000}]
        rows = [
            ({**document, "tags": " ".join(document.get("tags", []))}, {"boost": document.get("boost", 1)})
            for document in documents
        ]
        self.index = lunr.lunr(ref="location", fields=fields, documents=rows)

    def find_pages(self, question: str) -> list[str]:
        """Return the pages that answer a question, the best first."""
        words = question.lower().split()
        scores: dict[str, float] = {}
        for match in self.index.search(" ".join(f"{word} {word}*" for word in words)):
            found = {word for word in words if any(term.startswith(word[:4]) for term in match["match_data"].metadata)}
            is_page = "#" not in match["ref"] and len(found) == len(words)
            page = match["ref"].partition("#")[0]
            scores[page] = max(scores.get(page, 0.0), match["score"] * (2 if is_page else 1))
        return sorted(scores, key=lambda page: -scores[page])


def check_search_order(site: Path, questions: Mapping[str, str] = QUESTIONS) -> None:
    """Check that each question finds its guide first.

    Args:
        site: folder of the built site.
        questions: questions and the pages that must be first.

    Raises:
        ValueError: another page is first.
    """
    content = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    index = SearchIndex(content["docs"])
    for question, expected in questions.items():
        pages = index.find_pages(question)
        if pages[:1] != [expected]:
            raise ValueError(f"the search for “{question}” finds {', '.join(pages[:3]) or 'nothing'}, not {expected}")
