"""Our scorers against the library's, on honest answers, typical wrong ones, and others."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from string import ascii_letters
from typing import Any

import pytest

from shoal.node.sapo.gym import GymFamily
from shoal.node.sapo.scorers import SCORERS
from shoal.node.sapo.scorers_algebra import ExpressionError, polynomial
from shoal.node.sapo.scorers_logic import FormulaError, truth_table

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="the extra shoal[rl] is not installed")

SEEDS = 200
SLOW_SEEDS = {"countdown": 50, "simple_integration": 30}
"""Where the library takes a tenth of a second for an answer."""
Entry = Mapping[str, Any]


def entries(name: str, config: Mapping[str, Any] | None = None, seeds: int = SEEDS) -> list[tuple[Any, Entry]]:
    family = GymFamily(name)
    return [family._entry(config or {}, seed, 0) for seed in range(seeds)]


def right_answer(entry: Entry) -> str:
    return str(entry["answer"] if entry["answer"] is not None else entry["metadata"]["example_answer"])


def bad_number(entry: Entry, dice: random.Random) -> str:
    right = int(entry["answer"])
    return str(right + dice.choice((-1, 1)) * dice.randint(1, 20))


def bad_matrix(entry: Entry, dice: random.Random) -> str:
    rows = [[int(cell) for cell in row.split()] for row in entry["answer"].splitlines()]
    listed = str(rows)
    rows[dice.randrange(len(rows))][0] += 1
    return dice.choice((listed, str(rows), "\n".join(" ".join(map(str, row)) for row in rows), "7"))


def bad_date(entry: Entry, dice: random.Random) -> str:
    wrong = ("Monday", "Sunday", "friday", "THURSDAY", "yes", "Yes", "No", "no", "12", "0", "+9", "no idea", "3.5")
    return dice.choice(wrong)


def bad_decimal(entry: Entry, dice: random.Random) -> str:
    right = float(entry["answer"])
    return dice.choice(
        (f"{right:.3f}", f"{right + 0.0007:.6f}", f"{right + 0.1}", f"{right:.6e}", "1e500", "none", "7")
    )


def bad_fraction(entry: Entry, dice: random.Random) -> str:
    made = entry["metadata"]
    over, under = made["simplified_numerator"], made["simplified_denominator"]
    shown = dice.choice(
        ("{}/{}", "${}/{}$", "\\frac{{{}}}{{{}}}", "$\\dfrac{{ {} }}{{ {} }}$", "{} / {}", "{} over {}")
    )
    terms = ((over, under), (made["numerator"], made["denominator"]), (over, made["denominator"]), (under, over + 1))
    return shown.format(*dice.choice(terms))


def bad_formula(entry: Entry, dice: random.Random) -> str:
    variables = entry["metadata"]["variables"]

    def formula(depth: int) -> str:
        if depth == 0:
            return dice.choice(variables)
        if dice.random() < 0.3:
            return f"¬{formula(depth - 1)}"
        text = f"{formula(depth - 1)} {dice.choice('∧∨→↔')} {formula(depth - 1)}"
        return f"({text})" if dice.random() < 0.5 else text

    return formula(dice.randint(0, 3))


def bad_word(entry: Entry, dice: random.Random) -> str:
    right = str(entry["answer"])
    return dice.choice((right[:-1], right[::-1], f"It is {right}", f"{right} {right}", "no idea"))


def bad_integer(entry: Entry, dice: random.Random) -> str:
    right = int(entry["answer"], 0)
    forms = (str(right), bin(right), f"{right:#X}", hex(right + 1), hex(-right), f"{right:x}z", "0x", "012", "7")
    return dice.choice(forms)


def bad_letters(entry: Entry, dice: random.Random) -> str:
    right = entry["answer"]
    changed = right[:-1] + dice.choice("ABCDE")
    return dice.choice((str(list(right)), str(tuple(right)), f"'{right}'", f'"{changed}"', str(list(changed)), changed))


def bad_spiral(entry: Entry, dice: random.Random) -> str:
    right = entry["answer"].split()
    numbers = [int(digit) for digit in right]
    changed = [*numbers[:-1], numbers[-1] + 1]
    listed = (str(numbers), str(tuple(numbers)), ", ".join(right), str(right), str(changed), str(numbers[1:]))
    return dice.choice((*listed, " ".join(map(str, changed)), "the spiral", f"[{', '.join(right)}", "7"))


def bad_board(entry: Entry, dice: random.Random) -> str:
    solved = [row.split() for row in dice.choice(entry["metadata"]["valid_answers"]).split("\n")]
    changed = [solved[1], solved[0], *solved[2:]]
    boards = [solved, changed, entry["metadata"]["puzzle"], ["".join(row) for row in solved], solved[:-1]]
    plain = "\n".join(" ".join(row) for row in changed)
    return dice.choice((*map(str, boards), str(solved).replace("'", '"'), plain, "Q", "[[]]"))


def bad_sorting(entry: Entry, dice: random.Random) -> str:
    right = [float(number) for number in entry["metadata"]["sorted_numbers"]]
    near, far = [number + 0.25 for number in right], [number + 1.5 for number in right]
    forms = (right, near, far, right[::-1], right[1:], [f"{number}" for number in right])
    return dice.choice((*map(str, forms), str(right)[1:-1], "sorted", "[]", "['a', 'b']", "[1"))


def bad_integral(entry: Entry, dice: random.Random) -> str:
    right, name = entry["answer"], entry["metadata"]["variable"]
    polynomial = right.removesuffix(" + C")
    same = (polynomial, f"C + {polynomial}", f"({polynomial}) + 3/4", f"-(-({right}))", f"2*({polynomial})/2 + K")
    other = (f"{right} + {name}", f"({right})*2", f"{polynomial} + C*{name}", f"{name}**2", "0", "C", "1/", f"({right}")
    odd = (
        f"{right} = 0",
        f"the answer is {right}",
        f"{polynomial}^2",
        f"2{name}",
        f"{name}**-1 + 0.5",
        f"{name} {name}",
    )
    return dice.choice((*same, *other, *odd, entry["metadata"]["integrand"]))


def bad_expression(entry: Entry, dice: random.Random) -> str:
    right, numbers = entry["answer"], entry["metadata"]["numbers"]
    same = (f"({right})", f"+{right}", f"-(-({right}))", right.replace(" ", ""))
    other = [operator.join(map(str, numbers)) for operator in (" + ", " * ", " - ", "/")]
    odd = (f"{right} = 7", "7", "1/0", "x + 1", "1.5*2", right[:-1] + ")", "3 4", "(3)(4)", "2**3", "2***3", "1 +")
    return dice.choice((*same, *other, *odd, f"{right} + 0", f"{right} + 1 - 1", f"({right}) / 3"))


WRONG: Mapping[str, Callable[[Entry, random.Random], str]] = {
    "arc_1d": bad_word,
    "base_conversion": bad_word,
    "basic_arithmetic": bad_number,
    "bf": bad_word,
    "binary_matrix": bad_matrix,
    "bitwise_arithmetic": bad_integer,
    "calendar_arithmetic": bad_date,
    "countdown": bad_expression,
    "decimal_arithmetic": bad_decimal,
    "fraction_simplification": bad_fraction,
    "n_queens": bad_board,
    "number_sorting": bad_sorting,
    "propositional_logic": bad_formula,
    "simple_integration": bad_integral,
    "spiral_matrix": bad_spiral,
    "string_insertion": bad_letters,
}


@pytest.mark.parametrize("name", SCORERS)
def test_scorer_agrees_with_the_library(name: str) -> None:
    dice, rewards, full = random.Random(name), set(), 0
    seeds = SLOW_SEEDS.get(name, SEEDS)
    for dataset, entry in entries(name, seeds=seeds):
        right = right_answer(entry)
        reward = SCORERS[name](right, entry, dataset.config)
        assert reward == dataset.score_answer(right, entry)
        full += reward == 1.0
        for _ in range(5):
            wrong = WRONG[name](entry, dice)
            if not wrong:
                continue
            reward = SCORERS[name](wrong, entry, dataset.config)
            assert reward == pytest.approx(min(1.0, dataset.score_answer(wrong, entry)), abs=1e-12), (wrong, entry)
            rewards.add(round(reward, 2))
    assert full == seeds or (name == "propositional_logic" and full > 0.6 * SEEDS)  # it does not always find one
    assert len(rewards) > 1


def test_scorer_of_dates_gives_no_more_than_one_for_an_event_that_does_not_happen() -> None:
    dataset, _ = entries("calendar_arithmetic", seeds=1)[0]
    entry = {"answer": "-1", "metadata": {"task": "recurring_event_day"}}
    assert dataset.score_answer("3", entry) > 1
    assert 0 < SCORERS["calendar_arithmetic"]("3", entry, dataset.config) < 1e-6
    assert SCORERS["calendar_arithmetic"]("-1", entry, dataset.config) == 1.0


HOSTILE = {
    "brackets": "(" * 32_000,
    "lists": "[" * 32_000,
    "negations": "¬" * 32_000,
    "ones": "1" * 32_000,
    "nines": "[[" + "9" * 8000 + "]]",
    "exponents": "9**9**9",
    "huge exponent": "1e999999999",
    "no number": "nan",
    "signalling": "sNaN",
    "infinite": "-Infinity",
    "slashes": "/" * 32_000,
    "fractions": "\\frac{" * 5000,
    "digits in a fraction": "\\frac{" + "9" * 16_000 + "}{1}",
    "spaces": " " * 32_000 + "x",
    "tags": "<answer>" * 4000,
    "program": "__import__('os').system('touch /tmp/planted')",
    "class": "().__class__.__base__.__subclasses__()",
    "powers": "(a+b+c+d+e+f+g+h)**900",
    "powers of powers": "((((9**900)**900)**900)**900)",
    "products": "(a+b+c)*" * 250 + "d",
    "items": "[" + "1," * 4000 + "x]",
    "null": "\0" * 100,
    "other digits": "١٢٣",
    "connectives": "P∧" * 16_000 + "P",
    "groups": "P→(" * 8000 + "P" + ")" * 8000,
}


@pytest.fixture
def no_garbage_collected() -> Iterator[None]:
    """Nobody looks for garbage: that of a thousand tests before takes a second, and would count as the scorer's."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collected")
@pytest.mark.parametrize("name", SCORERS)
def test_scorer_gives_next_to_nothing_for_hostile_text_and_is_quick(name: str) -> None:
    family = GymFamily(name)
    task = family.make({}, 3, 0)
    family.score(task, "warm")
    for title, text in HOSTILE.items():
        began = time.thread_time()  # what the scorer computes, not what it waits for others who do
        assert 0.0 <= family.score(task, text) <= 0.05, title
        dataset, entry = family._entry({}, 3, 0)
        assert 0.0 <= SCORERS[name](text, entry, dataset.config) <= 0.05, title
        assert time.thread_time() - began < 0.5, title


def test_scorer_of_matrices_reads_lists_without_evaluating_them() -> None:
    entry = {"answer": "0 1\n1 2"}
    score = SCORERS["binary_matrix"]
    assert score("0 1\n1 2", entry, None) == 1.0
    assert score("[[0, 1], [1, 2]]", entry, None) == 0.1
    assert score("[[0,1],\n [1,2]]", entry, None) == 0.1
    for text in ("[[0, 1], [1, 3]]", "[[0, 1], [1, 2]", "[0, 1]", "[]", "7", '["01", "12"]', "((0, 1), (1, 2))"):
        assert score(text, entry, None) == 0.0, text


def test_polynomial_with_long_terms_takes_more_work_than_one_with_short_ones() -> None:
    names = [f"{one}{other}" for one in ascii_letters for other in ascii_letters]
    letters = "+".join(ascii_letters)
    assert len(polynomial("(x + 1)**50")) == 51
    assert len(polynomial(f"{names[0]}*({letters})")) == 52
    with pytest.raises(ExpressionError, match="too much work"):
        polynomial(f"{'*'.join(names[:200])}*({letters})")


@pytest.mark.parametrize(
    ("formula", "table"),
    [
        ("P", 0b1010),
        ("Q", 0b1100),
        ("¬P", 0b0101),
        ("¬¬P", 0b1010),
        ("¬P ∧ Q", 0b0100),
        ("¬(P ∧ Q)", 0b0111),
        ("P ∧ Q ∨ P", 0b1010),
        ("P ∨ P ∧ Q", 0b1010),
        ("P → Q", 0b1101),
        ("P → Q → P", 0b1010),  # (P → Q) → P
        ("P → (Q → P)", 0b1111),
        ("P ↔ Q", 0b1001),
        ("P ↔ Q → P", 0b1010 ^ 0b1011 ^ 0b1111),
        ("((P))", 0b1010),
    ],
)
def test_truth_table_of_a_formula(formula: str, table: int) -> None:
    """Bit i: under the assignment in which P is bit 0 of i, and Q bit 1."""
    assert truth_table(formula, ["P", "Q"]) == table


@pytest.mark.parametrize("text", ["", "R", "P Q", "P ∧", "∧ P", "(P", "P)", "()", "¬", "p", "P && Q", "P" * 3000])
def test_truth_table_refuses_what_is_no_formula(text: str) -> None:
    with pytest.raises(FormulaError):
        truth_table(text, ["P", "Q"])


def test_truth_table_bounds_depth_and_variables() -> None:
    assert truth_table("(" * 60 + "P" + ")" * 60, ["P"]) == 0b10
    for text in ("(" * 70 + "P" + ")" * 70, "¬" * 70 + "P"):
        with pytest.raises(FormulaError, match="too deep"):
            truth_table(text, ["P"])
    with pytest.raises(FormulaError, match="11 variables"):
        truth_table("P", [chr(65 + place) for place in range(11)])
