"""The demo's task: read the order number out of a customer's message, as JSON that a program can use.

A base model of this size answers in the right shape and copies the example's number. Held-out prompts use phrasings that training never
sees.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from core.contracts import AlgorithmSettings, Grader, LoraSettings, MultiGrader, OptimizerSettings, RolloutSettings
from core.contracts.graders import StringCheckGrader, TextSimilarityGrader

SYSTEM = "Extract the order number as JSON."
EXAMPLE = ("Where is QX-1182?", '{"order_id": "QX-1182"}')
PRODUCTS = (
    "rain jacket", "desk lamp", "kettle", "office chair", "bike helmet", "blender", "winter boots", "monitor", "tent", "phone case",
    "toaster", "garden hose",
)  # fmt: skip
DAYS = ("on Monday", "last Friday", "yesterday", "two weeks ago", "on the 3rd", "this morning")
TRAINING_PHRASINGS = (
    "Hello, order {order} still has not arrived.",
    "I want to send back the {product} from order {order}.",
    "You charged me twice for {order}, please check.",
    "Can you tell me the status of {order}? I ordered it {day}.",
    "About {order}: the {product} came broken.",
    "The {product} in order {order} is the wrong colour.",
    "Please cancel {order}, I picked the wrong {product}.",
    "I bought a {product} {day}, number {order}, and heard nothing since.",
    "My reference is {order}. When will it be delivered?",
    "{order} - where is my {product}?",
    "Is it too late to add a {product} to {order}?",
    "The courier says {order} was delivered {day}, but it was not.",
    "I need an invoice for order {order}.",
    "Half of {order} is missing, only the {product} came.",
    "Order number {order}, placed {day}: please change the address.",
)
HELD_OUT_PHRASINGS = (
    "I need help with my purchase {order}.",
    "Your driver lost my {product}, the order was {order}.",
    "Could {order} be shipped before the weekend? I paid {day}.",
    "Refund for {order}, please. The {product} does not work.",
    "Good morning, what happened to {order}?",
    "The label on the box says {order} but inside is a {product} I never ordered.",
)
_LETTERS = "ABCDEFGHJKLMNPRSTUVWXYZ"


@dataclass(frozen=True)
class DemoTask:
    """Files, grader and settings of the demo's job."""

    training_rows: tuple[dict[str, Any], ...]
    held_out_rows: tuple[dict[str, Any], ...]
    grader: Grader
    lora: LoraSettings
    algorithm: AlgorithmSettings
    rollout: RolloutSettings
    optimizer: OptimizerSettings
    num_steps: int
    seed: int


def make_task(*, num_steps: int = 9) -> DemoTask:
    """The task, the same at every call. 8 prompts a step: no row is seen twice in the default number of steps."""
    return DemoTask(
        training_rows=_rows(TRAINING_PHRASINGS, 96, seed=1),
        held_out_rows=_rows(HELD_OUT_PHRASINGS, 24, seed=2),
        grader=make_grader(),
        lora=LoraSettings(rank=16, alpha=32.0),
        # A light KL term: 9 steps can't drift far, and people see how far the policy is from its base.
        algorithm=AlgorithmSettings(group_size=8, beta=0.01),
        rollout=RolloutSettings(temperature=1.0, max_tokens=24),
        optimizer=OptimizerSettings(learning_rate=3e-4, schedule="constant"),
        num_steps=num_steps,
        seed=7,
    )


def make_grader() -> Grader:
    """0 to 1: is the number there, is it the value of the right key, how close is the text to exactly the JSON wanted.

    The square keeps an answer that copies the example's number from being worth much: all but the number is right in it.
    """
    output, order_id, answer = "{{sample.output_text}}", "{{item.order_id}}", "{{item.answer}}"
    return MultiGrader(
        type="multi",
        name="order_number",
        graders={
            "number": StringCheckGrader(type="string_check", name="number", input=output, reference=order_id, operation="like"),
            "value": StringCheckGrader(
                type="string_check", name="value", input="{{sample.output_json.order_id}}", reference=order_id, operation="eq"
            ),
            "closeness": TextSimilarityGrader(
                type="text_similarity", name="closeness", input=output, reference=answer, evaluation_metric="fuzzy_match"
            ),
        },
        calculate_output="0.3 * number + 0.4 * value + 0.3 * closeness ** 2",
    )


def to_jsonl(rows: tuple[dict[str, Any], ...]) -> bytes:
    """A training file: one JSON object a line."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _rows(phrasings: tuple[str, ...], num_rows: int, *, seed: int) -> tuple[dict[str, Any], ...]:
    rng = random.Random(seed)
    return tuple(_row(phrasings[i % len(phrasings)], rng) for i in range(num_rows))


def _row(phrasing: str, rng: random.Random) -> dict[str, Any]:
    order_id = "".join(rng.choices(_LETTERS, k=2)) + f"-{rng.randint(1000, 9999)}"
    message = phrasing.format(order=order_id, product=rng.choice(PRODUCTS), day=rng.choice(DAYS))
    messages = [
        {"role": "system", "content": SYSTEM}, {"role": "user", "content": EXAMPLE[0]}, {"role": "assistant", "content": EXAMPLE[1]},
        {"role": "user", "content": message},
    ]  # fmt: skip
    return {"messages": messages, "order_id": order_id, "answer": json.dumps({"order_id": order_id})}
