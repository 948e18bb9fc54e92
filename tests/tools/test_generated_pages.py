"""Generated pages: the picture of docs/parallel.md, and the table of stock configurations."""

from pathlib import Path

import pytest

from megatron.distributed.mesh import Mesh
from tools.docs import parallel_page, stock_configs


def test_the_drawn_holders_are_the_groups_of_the_mesh() -> None:
    mesh = Mesh(parallel_page.HIGHLIGHTED_GPU, parallel_page.SIZES)
    same_weights = parallel_page.list_storing_gpus(tensor=mesh.tensor.index, stage=mesh.pipeline.index)
    assert tuple(same_weights) == mesh.list_members("context", "data") == (1, 3, 5, 7)
    same_tokens = parallel_page.list_storing_gpus(data=mesh.data.index, place=0)
    assert tuple(same_tokens) == mesh.list_members("tensor", "pipeline") == (4, 5, 12, 13)
    assert parallel_page.list_storing_gpus(data=mesh.data.index, place=7) == same_tokens  # from either end


def test_the_picture_is_the_same_each_time() -> None:
    first = parallel_page.draw_picture()
    assert first.startswith(b"\x89PNG")
    assert first == parallel_page.draw_picture()


def test_files_are_counted_with_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "project" / "configs"
    (folder / "llama").mkdir(parents=True)
    # As in GPT-NeoX's llama/13B.yml, pythia/1B.yml and a mixture-of-experts model.
    (folder / "llama" / "13B.yml").write_text(
        "{norm: rmsnorm, use_bias_in_norms: false, activation: swiglu, intermediate_size: 40960, mlp_multiple_of: 256, "
        "model-parallel-size: 2, make_vocab_size_divisible_by: 1, hidden-size: 5120, num-attention-heads: 40}"
    )
    (folder / "1B.yml").write_text("{fp16: {enabled: true, auto_cast: true}, extra-save-iters: [0, 1, 2]}")
    (folder / "experts.yml").write_text("{moe_num_experts: 8}")
    page = tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", ["stock_configs.py", str(folder), "--markdown", str(page)])
    stock_configs.main()
    printed = capsys.readouterr().out
    assert "| project | 3 | 2 |" in printed
    assert (
        "| `project/experts.yml` | moe_num_experts: 8 is not supported: there are no mixture-of-experts layers; leave "
        in printed
    )
    assert page.read_text().endswith(printed)
    monkeypatch.setattr("sys.argv", ["stock_configs.py", str(tmp_path / "gone")])
    with pytest.raises(SystemExit) as ended:
        stock_configs.main()
    assert ended.value.code == 2
