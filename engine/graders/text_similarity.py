"""Text similarities from 0 to 1, by the libraries that define them. Each is imported when first used: nltk and sacrebleu are heavy."""

import re
from functools import lru_cache
from typing import Any

from core.contracts import TextMetric

# One token per CJK character, since those scripts put no spaces between words; elsewhere runs of letters and digits.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af"
_TOKEN = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
_HAS_CJK = re.compile(f"[{_CJK}]")

UNAVAILABLE: dict[str, str] = {
    "cosine": "cosine needs an embedding model, which this platform does not run; take fuzzy_match, bleu, gleu or a rouge metric",
    "meteor": "meteor needs WordNet's data, which this platform does not ship; take gleu or rouge_l",
}
"""Metrics of the wire that can't run here, and why."""


class _Tokenizer:
    """For rouge-score, whose own tokenizer drops everything that is not ASCII."""

    def tokenize(self, text: str) -> list[str]:
        return tokens_of(text)


def tokens_of(text: str) -> list[str]:
    """Lower-case words of any script; each CJK character is a word."""
    return _TOKEN.findall(text.lower())


def text_similarity(text: str, reference: str, metric: TextMetric) -> float:
    """Similarity of text to reference.

    fuzzy_match: rapidfuzz ratio. bleu: sacrebleu sentence BLEU (effective order; its zh tokenizer when the reference holds CJK).
    gleu: nltk sentence GLEU over words. rouge_1 to rouge_5, rouge_l: rouge-score F1, no stemming.

    Raises:
        ValueError: a metric of `UNAVAILABLE`; `validate_grader` refuses those earlier.
    """
    if metric in UNAVAILABLE:
        raise ValueError(UNAVAILABLE[metric])
    if metric == "fuzzy_match":
        from rapidfuzz import fuzz

        return fuzz.ratio(text, reference) / 100.0
    if metric == "bleu":
        return _bleu("zh" if _HAS_CJK.search(reference) else "13a").sentence_score(text, [reference]).score / 100.0
    if metric == "gleu":
        from nltk.translate.gleu_score import sentence_gleu

        words, wanted = tokens_of(text), tokens_of(reference)
        return float(sentence_gleu([wanted], words)) if words and wanted else float(words == wanted)
    name = "rougeL" if metric == "rouge_l" else f"rouge{metric.removeprefix('rouge_')}"
    return float(_rouge(name).score(reference, text)[name].fmeasure)


@lru_cache(maxsize=2)
def _bleu(tokenize: str) -> Any:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(tokenize=tokenize, effective_order=True)


@lru_cache(maxsize=6)
def _rouge(name: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([name], tokenizer=_Tokenizer())
