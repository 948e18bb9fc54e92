"""Files of a folder that load, and the reasons for the others."""

from pathlib import Path

import pytest

from tools.docs import stock_configs


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
