"""Read exports as a user who has only torch and transformers: `reader.py FOLDER…`.

Each FOLDER contains an export, the expected results of this project (`expected.safetensors`) and their inputs
(`case.json`). The export is in a folder of the same name as FOLDER, because transformers 4 distinguishes exports by
folder name. The tool prints one JSON object per line: the largest difference of any logit, relative to the largest
logit, for each way to read.
"""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()


def compute_relative_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


def run_in_chunks(model: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the logits of tokens processed in three chunks with the cache."""
    outputs, past, length = [], None, tokens.shape[1]
    borders = [0, length // 3, length // 3 + 1, length]
    for start, stop in pairwise(borders):
        seen = None if mask is None else mask[:, :stop]
        found = model(tokens[:, start:stop], attention_mask=seen, past_key_values=past, use_cache=True)
        past = found.past_key_values
        outputs.append(found.logits)
    return torch.cat(outputs, dim=1)


@torch.inference_mode()
def measure_differences(folder: Path) -> dict[str, float]:
    """Return the difference between each way to read and the expected results."""
    case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    expected = load_file(folder / "expected.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder / folder.name, trust_remote_code=True, dtype=torch.float32)
    rows = [torch.tensor(each)[None] for each in case["tokens"]]
    longest, shortest = rows[0], rows[-1]
    batch = torch.zeros(len(rows), longest.shape[1], dtype=torch.int64)
    mask = torch.zeros_like(batch)
    for index, row in enumerate(rows):
        batch[index, -row.shape[1] :], mask[index, -row.shape[1] :] = row[0], 1

    def of_padded(logits: Tensor) -> float:
        pairs = zip(rows, logits, strict=True)
        return max(
            compute_relative_difference(found[-row.shape[1] :], expected[str(row.shape[1])][0]) for row, found in pairs
        )

    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]

    def of_packed(logits: Tensor) -> float:
        parts = logits.split([row.shape[1] for row in rows], dim=1)
        pairs = zip(rows, parts, strict=True)
        return max(compute_relative_difference(found, expected[str(row.shape[1])]) for row, found in pairs)

    found = {
        "1x whole": compute_relative_difference(model(shortest).logits, expected[str(shortest.shape[1])]),
        "4x whole": compute_relative_difference(model(longest).logits, expected[str(longest.shape[1])]),
        "padded whole": of_padded(model(batch, attention_mask=mask).logits),
        "packed": of_packed(model(torch.cat(rows, dim=1), position_ids=positions).logits),
    }
    if case["cached"]:
        found["1x cached"] = compute_relative_difference(
            run_in_chunks(model, shortest), expected[str(shortest.shape[1])]
        )
        found["4x cached"] = compute_relative_difference(run_in_chunks(model, longest), expected[str(longest.shape[1])])
        found["padded cached"] = of_padded(run_in_chunks(model, batch, mask))
    else:
        try:
            model(shortest, use_cache=True)
        except ValueError as error:
            if "use_cache must be False" not in str(error):
                raise
        else:
            raise RuntimeError(f"{case['title']}: randomized positions were cached")
    return found


def main() -> None:
    for forbidden in ("megatron.position", "megatron.kernels.runtime"):
        try:
            __import__(forbidden)
        except ImportError:
            continue
        raise SystemExit(f"error: {forbidden} can be imported here; run reader.py where this project is not installed")
    torch.set_num_threads(1)
    for folder in sys.argv[1:]:
        print(json.dumps(measure_differences(Path(folder))), flush=True)


if __name__ == "__main__":
    main()
