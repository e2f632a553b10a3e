"""Graders: templates, comparisons, similarities, formulas; what is refused at submit and what is excluded, never scored 0."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import TypeAdapter

from core.contracts import Grader
from core.errors import InvalidInput
from engine.graders import GraderError, grade, item_paths, validate_grader
from engine.graders.errors import SampleParseError
from engine.graders.multi import evaluate, validate_formula
from engine.graders.templates import Sample, parse, render
from engine.graders.text_similarity import text_similarity, tokens_of

GRADERS: TypeAdapter[Any] = TypeAdapter(Grader)
ITEM = {"answer": "RA-5892", "order": {"id": 7, "lines": [{"sku": "x"}], "paid": True, "note": None}, "dash-ed": "d"}


def check(name: str = "c", **fields: str) -> dict[str, Any]:
    return {
        "type": "string_check", "name": name, "input": "{{sample.output_text}}", "reference": "{{item.answer}}", "operation": "eq"
    } | fields  # fmt: skip


def similar(metric: str, **fields: str) -> dict[str, Any]:
    base = {"type": "text_similarity", "name": "s", "input": "{{sample.output_text}}", "reference": "{{item.answer}}"}
    return base | {"evaluation_metric": metric} | fields


def multi(formula: str, **parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "multi", "graders": parts, "calculate_output": formula}


def made(value: dict[str, Any]) -> Any:
    return GRADERS.validate_python(value)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("plain", "plain"),
        ("{{item.answer}}", "RA-5892"),
        ("{{ item.order.id }}/{{item.order.lines.0.sku}}", "7/x"),
        ("{{item.order.paid}} {{item.order.note}} {{item.dash-ed}}", "true null d"),
        ('{"a": {"b": 1}} {{item.order}}', '{"a": {"b": 1}} {"id": 7, "lines": [{"sku": "x"}], "paid": true, "note": null}'),
        ("<{{sample.output_text}}>", '< {"f": {"g": "é"}} >'),
        ("{{sample.output_json.f.g}}{{sample.output_json.f}}", 'é{"g": "é"}'),
    ],
)
def test_templates_fill_in(template: str, text: str) -> None:
    assert render(parse(template), item=ITEM, sample=Sample(' {"f": {"g": "é"}} ')) == text


def test_filled_in_text_is_not_a_template_again() -> None:
    assert render(parse("{{item.answer}}"), item={"answer": "{{item.secret}}", "secret": "s"}, sample=Sample("")) == "{{item.secret}}"


@pytest.mark.parametrize(
    "template",
    [
        "{{item.a", "{{}}", "{{item}}", "{{items.a}}", "{{sample.choices}}", "{{sample.output_text.x}}", "{{item.a + 1}}", "{{item['a']}}",
        "{{item.__class__()}}", "{{item..a}}", "{{ {{item.a}} }}", "{% if x %}{{",
    ],
)  # fmt: skip
def test_templates_are_strict(template: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(template, "grader.input")
    assert caught.value.param == "grader.input"


def test_attributes_of_python_are_not_fields() -> None:
    with pytest.raises(GraderError) as caught:
        render(parse("{{item.__class__}}"), item=ITEM, sample=Sample(""))
    assert caught.value.param == "item.__class__"


def test_missing_field_names_its_path_and_excludes_the_row() -> None:
    with pytest.raises(GraderError) as caught:
        render(parse("{{item.order.total}}"), item=ITEM, sample=Sample(""))
    assert (caught.value.param, caught.value.flag) == ("item.order.total", "invalid_variable_error")
    result = grade(made(check(reference="{{item.order.total}}")), item=ITEM, output_text="x")
    assert result.reward is None
    assert result.errors["invalid_variable_error"] is True


@pytest.mark.parametrize("output", ["not json", '{"id": NaN}', "[" * 100_000, "", '{"other": 1}', "1" * 5000, '"id"'])
def test_completion_that_is_not_the_wanted_json_scores_0(output: str) -> None:
    with pytest.raises(SampleParseError):
        render(parse("{{sample.output_json.id}}"), item={}, sample=Sample(output))
    for operation in ("eq", "ne"):
        result = grade(made(check(input="{{sample.output_json.id}}", operation=operation)), item=ITEM, output_text=output)
        assert result.reward == 0.0
        assert result.errors["sample_parse_error"] is True
        assert isinstance(result.errors["sample_parse_error_details"], str)


@pytest.mark.parametrize(
    ("operation", "output", "reward"),
    [
        ("eq", "RA-5892", 1), ("eq", "RA-5892 ", 0), ("ne", "RA-5892", 0), ("ne", "x", 1), ("like", "is RA-5892.", 1), 
        ("like", "is ra-5892.", 0),
        ("ilike", "is ra-5892.", 1), ("ilike", "RA", 0),
    ],
)  # fmt: skip
def test_string_check(operation: str, output: str, reward: float) -> None:
    assert grade(made(check(operation=operation)), item=ITEM, output_text=output).reward == reward


@pytest.mark.parametrize("metric", ["fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"])
def test_similarities_run_from_0_to_1(metric: Any) -> None:
    reference = "the quick brown fox jumps over the lazy dog"
    same, part = text_similarity(reference, reference, metric), text_similarity("the quick brown fox jumps over it", reference, metric)
    other = text_similarity("zzz", reference, metric)
    assert same == pytest.approx(1.0)
    assert 0.0 <= other < part < 1.0
    assert text_similarity("", reference, metric) == 0.0
    assert 0.0 <= text_similarity("", "", metric) <= 1.0


@pytest.mark.parametrize("metric", ["bleu", "gleu", "rouge_1", "rouge_l"])
def test_similarities_read_scripts_without_spaces(metric: Any) -> None:
    assert text_similarity("订单号码是五八九二", "订单号码是五八九二", metric) == pytest.approx(1.0)
    assert 0.0 < text_similarity("订单号码是五八九一", "订单号码是五八九二", metric) < 1.0


def test_similarity_values_are_the_libraries_own() -> None:
    assert text_similarity("the cat", "the cat sat", "rouge_1") == pytest.approx(0.8)
    assert text_similarity("the cat", "the cat sat", "rouge_2") == pytest.approx(2 / 3)
    assert text_similarity("abcd", "abce", "fuzzy_match") == pytest.approx(0.75)
    assert tokens_of("Añb c_d 你好") == ["añb", "c", "d", "你", "好"]


@pytest.mark.parametrize("metric", ["cosine", "meteor"])
def test_metrics_that_cannot_run_are_refused_with_the_reason(metric: str) -> None:
    with pytest.raises(InvalidInput, match=r"needs|does not") as caught:
        validate_grader(made(multi("a", a=similar(metric))), None, param="method.reinforcement.grader")
    assert caught.value.param == "method.reinforcement.grader.graders.a.evaluation_metric"


def test_multi_combines_its_parts_and_nests() -> None:
    inner = multi("max(a, b)", a=check(), b=similar("fuzzy_match"))
    grader = made(multi("0.2 * inner + 0.8 * exact", inner=inner, exact=check()))
    validate_grader(grader, {"answer"})
    result = grade(grader, item=ITEM, output_text="RA-5893")
    assert result.sub_rewards == {"inner.a": 0.0, "inner.b": pytest.approx(6 / 7), "inner": pytest.approx(6 / 7), "exact": 0.0}
    assert result.reward == pytest.approx(0.2 * 6 / 7)
    assert result.errors == {}


def test_part_without_a_score_leaves_the_whole_without_one() -> None:
    grader = made(multi("a + b", a=check(), b=check(reference="{{item.gone}}")))
    result = grade(grader, item=ITEM, output_text="RA-5892")
    assert result.reward is None
    assert result.sub_rewards == {"a": 1.0, "b": None}


def test_part_that_the_completion_can_not_be_parsed_for_counts_0() -> None:
    grader = made(multi("a + 0.5", a=check(input="{{sample.output_json.id}}")))
    result = grade(grader, item=ITEM, output_text="no json")
    assert result.reward == 0.5
    assert result.errors["sample_parse_error"] is True


@pytest.mark.parametrize("formula", ["log(0.8 - a)", "exp(a * 2000)", "2 ** 1023 * (a + 2)", "1 / floor(a)"])
def test_undefined_formula_excludes_and_is_never_0(formula: str) -> None:
    result = grade(made(multi(formula, a=similar("fuzzy_match"))), item=ITEM, output_text="RA-5893")
    assert result.reward is None
    assert result.errors["other_error"] is True


def test_formula_arithmetic() -> None:
    scores = {"a": 0.5, "b": 2.0}
    assert evaluate("-a + b ** 2 * (a < b) % 3", scores) == -0.5 + 4 % 3
    assert (
        evaluate("min(a, b) + max(a, b, 3) + abs(-a) + floor(1.7) + ceil(1.2) + sqrt(4) + exp(0) + log(1)", scores)
        == 0.5 + 3 + 0.5 + 1 + 2 + 2 + 1
    )
    assert evaluate("a == 0.5", scores) == 1.0


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        ("a + c", "no part"), ("a +", "can't be read"), ("9 ** 9 ** 9", "undefined"), ("a ** 2 + 10 ** 400", "undefined"), 
        ("1 / a", "undefined"),
        ("log(a)", "undefined"), ("a if b else 1", "IfExp"), ("a.real", "Attribute"), ("a and b", "BoolOp"), ("'x' * 9", "only numbers"),
        ("[a][0]", "formulas don't have"), ("open(a)", "calls something unknown"), ("(lambda: a)()", "formulas don't have|calls something"),
        ("min(a, key=b)", "keyword|calls something"), ("True + a", "only numbers"), ("1e999 * (a + 1)", "is inf"), ("min", "undefined"),
        ("sqrt(a - 0.6)", "undefined"), ("-" * 999 + "a", "undefined|can't be read"), ("a; b", "can't be read"), ("a << 9", "LShift"),
        ("__import__('os')", "calls something|unknown"), ("min()", "undefined"), ("f'{a}'", "formulas don't have"),
    ],
)  # fmt: skip
def test_formulas_are_refused_at_submit(formula: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        validate_formula(formula, ["a", "b"], param="grader.calculate_output")
    assert caught.value.param == "grader.calculate_output"


def test_part_named_like_a_function_is_refused() -> None:
    with pytest.raises(InvalidInput, match="rename"):
        validate_formula("max", ["max"], param="p")


def test_unknown_field_of_rows_is_refused_where_it_is_read() -> None:
    grader = made(multi("a + b", a=check(), b=check(reference="{{item.total.sum}}")))
    assert item_paths(grader) == {("answer",), ("total", "sum")}
    validate_grader(grader, None)
    with pytest.raises(InvalidInput, match="'total'") as caught:
        validate_grader(grader, {"answer"})
    assert caught.value.param == "grader.graders.b.reference"


def test_graders_do_not_nest_for_ever() -> None:
    grader = check()
    for _ in range(5):
        grader = multi("a", a=grader)
    with pytest.raises(InvalidInput, match="nest"):
        validate_grader(made(grader), None)


def test_importing_graders_loads_no_heavy_library() -> None:
    code = "import sys, engine.graders; print([m for m in ('nltk', 'sacrebleu', 'rouge_score', 'rapidfuzz', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
