r"""Formulas of the methods in LaTeX, which the site's build converts to MathML.

A method's own `formula` is plain text for terminals. An entry here repeats it for the page of the method: the formula,
and the words after it in Markdown, with LaTeX between dollar signs. A test compares both versions sign by sign. A
method without an entry shows its plain text.
"""

import html
import re
from typing import NamedTuple

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?:\((?P<inline>.*?)\\\)|\[(?P<block>.*?)\\\])</(?P=tag)>',
    flags=re.DOTALL,
)
"""Formulas in the output of Markdown's extension pymdownx.arithmatex."""


class Formula(NamedTuple):
    """Formula of a method.

    Attributes:
        latex: the formula.
        words: Markdown after the formula, or an empty string.
    """

    latex: str
    words: str = ""

    def to_markdown(self) -> str:
        """Return a displayed formula with its words below."""
        return f"$$\n{self.latex}\n$$" + (f"\n\n{self.words}" if self.words else "")


SLOPES = "$m$ ALiBi's slopes"
METHOD_FORMULAS: dict[str, Formula] = {
    "alibi": Formula(
        r"-m_h n",
        r"$m_h = 2^{-8h/P}$ for $h \le P = 2^{⌊\log_2 H⌋}$, and $2^{-4(2(h - P) - 1)/P}$ beyond",
    ),
    "bam": Formula(
        r"-e^s (n + 10^{-5})^β", r"with location $-e^s (\lvert n + 2\,\sinh\,μ\rvert + 10^{-5})^β$"
    ),
    "cope": Formula(
        r"\frac{q_i \cdot k_j}{\sqrt{d}} + q_i \cdot e[p_{ij}]",
        r"$p_{ij} = \min\left(\sum_{t=j}^{i} σ\left(\frac{q_i \cdot k_t}{\sqrt{d}}\right), "
        r"\text{positions} - 1\right)$, $e$ interpolated",
    ),
    "fire": Formula(
        r"f\left(\frac{\log(1 + c\,n)}{\log(1 + c\,\max(L, i)) + 10^{-6}}\right)",
        r"$f$ an MLP $1 \to \text{width} \to H$ with ReLU, $L = \text{multiplier}\cdot T_{\text{train}}/2$",
    ),
    "fope": Formula(
        r"\frac{(F_i q_i) \cdot (F_j k_j)}{\sqrt{d}}",
        r"$F_n$ maps the pair $m$ by $[C, -S; S, C]$, $C = \sum_ω a_{mω} \cos(ω n)$, $S = \sum_ω b_{mω} \sin(ω n)$, "
        r"over $ω = \text{base}^{-2m/d} \ge 2π/L$; pairs of smaller $ω$ are unchanged",
    ),
    "fox": Formula(
        r"\frac{q_i \cdot k_j}{\sqrt{d}} + \sum_{l=j+1}^{i} \log\,σ(w_h \cdot x_l + b_h)", r"$x$ the layer's input"
    ),
    "gaussian_bias2": Formula(r"+r_1 \exp(-r_2 n^2)"),
    "gaussian_bias3": Formula(r"+r_1 \exp(-r_2 n^{r_3})"),
    "gaussian_weight1": Formula(r"\frac{q \cdot k}{\sqrt{d}} \exp(-r_1 n^2)"),
    "gaussian_weight2": Formula(r"\frac{q \cdot k}{\sqrt{d}} \exp(-r_1 n^{r_2})"),
    "grape_a": Formula(
        r"\frac{q_i \cdot k_j}{\sqrt{d}} - n\,ω_h\,\text{softplus}\left(\frac{u_h \cdot k_j}{\sqrt{d}}\right)",
        r"with gates: query_key also $-n\,ω_h\,\text{softplus}\left(\frac{v_h \cdot q_i}{\sqrt{d}}\right)$",
    ),
    "inverse": Formula(r"-\ln(n + 1)", rf"(released: $-\ln(1 + m\,n)$, {SLOPES})"),
    "inverse_nlogn": Formula(
        r"-\ln((n + 2) \ln(n + 2))", rf"(released: $-\ln((3 + m\,n) \ln(3 + m\,n))$, {SLOPES})"
    ),
    "kerple_bias_weight": Formula(r"\frac{q \cdot k}{\sqrt{d}} \exp(-r_3 n^{r_4}) - r_1 n^{r_2}"),
    "kerple_log": Formula(r"-r_1 \log(1 + r_2 n)"),
    "kerple_log3": Formula(r"-r_1 \log(1 + r_2 n^{r_3})"),
    "kerple_power": Formula(r"-r_1 n^{r_2}"),
    "learned": Formula(r"x_i + p_i", r"$p$ a learned table"),
    "none": Formula(r"\frac{q \cdot k}{\sqrt{d}}"),
    "pope": Formula(
        r"\frac{\sum_c \text{softplus}(q_{ic})\,\text{softplus}(k_{jc})"
        r"\cos\left((j - i)/\text{base}^{c/d} + δ_c\right)}{\sqrt{d}}",
        r"$c = 0 \dots d - 1$",
    ),
    "rotary": Formula(
        r"\frac{(R_i q_i) \cdot (R_j k_j)}{\sqrt{d}}",
        r"$R_i$ turns the pair $(m, m + r/2)$ by $i/\text{base}^{2m/r}$, $r = \text{fraction} \cdot d$",
    ),
    "rotary_local": Formula(
        r"\frac{(R_i q_i) \cdot (R_j k_j)}{\sqrt{d}}",
        r"$R_i$ turns the pair $(m, m + r/2)$ by $i/\text{local_base}^{2m/r}$, $r = \text{fraction} \cdot d$",
    ),
    "sandwich": Formula(
        r"k_h \left(\sum_j \cos\left(n/\text{base}^{2j/m}\right) - \frac{m}{2}\right)",
        r"$k_h = \frac{H}{8h}$, $m = \text{dimension}$, $j = 1 \dots m/2$ (from_zero: $0 \dots m/2 - 1$)",
    ),
    "sinusoidal": Formula(
        r"x_i + p_i",
        r"$p_i = [\sin(i/\text{base}^{2m/D}) \text{ for } m < D/2; \cos(i/\text{base}^{2m/D}) \text{ for } m < D/2]$",
    ),
    "t5": Formula(
        r"s\,b[\text{bucket}(n)]",
        r"$s = 1$, or $\sqrt{d}$ with root_scale; bucket $= n$ below $e = \text{num_buckets}/2$, then "
        r"$e + \left⌊\frac{\log(n/e)}{\log(\text{max_distance}/e)}\,e\right⌋$, at most $2e - 1$",
    ),
    "transformer_xl": Formula(
        r"\frac{(q_i + u) \cdot k_j + (q_i + v) \cdot W_R R_n}{\sqrt{d}}",
        r"$R_n = [\sin(n/\text{base}^{2m/D}); \cos(n/\text{base}^{2m/D})]$",
    ),
    "type1": Formula(r"-2 \ln(n + 1)", rf"(released: $-\ln(1 + (m\,n)^2)$, {SLOPES})"),
    "type2": Formula(r"-\ln^2(n + 1)", rf"(released: $-\ln^2(3 + m\,n)$, {SLOPES})"),
    "cdape": Formula(
        r"S + B + \text{Conv}_2(\text{LeakyReLU}(\text{Conv}_1(\text{tril}([S, B]))))",
        r"kernels $1 \times k$ along keys"
    ),
    "dape": Formula(r"S + B + \text{MLP}([S, B])", "over heads, LeakyReLU"),
    "mta": Formula(
        r"M_w\,\text{softmax}(K \ast (S + B))",
        r"$K$ of $c_q \times c_k$ per head over queries and keys, $M_w$ over groups of heads; norm",
    ),
    "selective": Formula(
        r"S_{ij} + B_{ij} - \sum_{j < l < i} \text{ReLU}(S_{lj} + B_{lj} \text{ of head } 0)",
        "the first token is never masked",
    ),
    "ssmax_prior": Formula(r"s\,\log\,n\,(S + B)", r"$n$ the keys that the row sees"),
    "talking_heads": Formula(
        r"\text{weights} = (I + W_w)\,\text{softmax}((I + W_l)(S + B))", r"maps of the heads to each other"
    ),
    "llama4": Formula(
        r"1 + \text{attn_scale} \log\left(1 + \text{floor}\left(\frac{i + 1}{\text{floor_scale}}\right)\right)",
        r"$i$ the row's position",
    ),
    "logn": Formula(
        r"\max\left(1, \frac{\log\,n}{\log\,T}\right)", r"$n$ the keys that the row sees, $T = \text{length}$"
    ),
    "ssmax": Formula(r"s\,\log\,n", r"$n$ the keys that the row sees"),
}  # fmt: skip


def convert_formulas(content: str, page: str) -> str:
    """Convert the LaTeX in the HTML of a page to MathML.

    Args:
        content: HTML with the output of pymdownx.arithmatex.
        page: name of the page, for errors.

    Raises:
        ValueError: LaTeX that the converter does not know.
    """

    def replace(match: re.Match[str]) -> str:
        from latex2mathml.converter import convert

        latex = html.unescape(match["inline"] or match["block"]).strip()
        try:
            mathml = convert(latex, display="inline" if match["block"] is None else "block")
        except Exception as error:  # the library's errors have no common class
            raise ValueError(f"{page}: {latex}: not LaTeX that can be converted ({type(error).__name__})") from None
        if unknown := re.search(r"\\[a-zA-Z]+", mathml):
            raise ValueError(f"{page}: {latex}: unknown command {unknown[0]}")
        return mathml

    return FORMULA.sub(replace, content)
