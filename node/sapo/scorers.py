"""Scorers of our own: they evaluate nothing and take time linear in the text, or bounded.

They are there for the nine families of the paper, and for seven more where the library's scorer executes Python: the
answer in countdown, n_queens, simple_integration, spiral_matrix and string_insertion, what it made itself in
bitwise_arithmetic and number_sorting.

Each gives what `score_answer` of reasoning-gym 0.1.25 gives to an answer of the form that the question asks for, right
or wrong, and partial rewards where that does. They differ where the library is lenient beyond that form, or harmful:

* all: an answer is at most `ANSWER_LIMIT_CHARS` long; spaces around it do not count.
* binary_matrix: the 0.1 for a Python list of lists is given to a list of lists of plain numbers; the library evaluates
  the answer as a Python expression, whatever it says.
* calendar_arithmetic: where the right number is negative (an event that does not happen: -1), the error counts from
  its absolute value; the library gives exp of a positive number, rewards far above 1, to wrong answers.
* decimal_arithmetic: plain decimal notation with at most three digits of exponent.
* countdown, simple_integration: sums, products, quotients and whole powers (scorers_algebra.py) of numbers and, in an
  integral, names; a divisor has one term. The library takes whatever sympy does, functions too.
* n_queens, spiral_matrix, string_insertion: the part of the reward for a Python list is given to lists of plain
  numbers or quoted letters; the library evaluates the answer as a Python expression, whatever it says.
* number_sorting: plain decimal notation, quoted or not.
* propositional_logic: 0.0 for text that is no formula over the task's variables; the library gives 0.05 to any text
  without capital letters, and takes foreign names for variables.

Source: arXiv 2509.08721, section 4; https://github.com/open-thought/reasoning-gym
"""

from __future__ import annotations

import decimal
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from shoal.node.sapo.scorers_algebra import ExpressionError, derivative, number, polynomial
from shoal.node.sapo.scorers_logic import FormulaError, is_atom, truth_table, truth_table_width

SCORERS_VERSION = 2
"""Part of each family's version: rewards of other versions do not mix."""

ANSWER_LIMIT_CHARS = 8192

Entry = Mapping[str, Any]
"""A task as reasoning-gym makes it: question, answer, metadata."""
Scorer = Callable[[str, Entry, Any], float]
"""(answer, entry, the generator's config) to a reward in [0, 1]."""

_WEEKDAYS = frozenset(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"))
_WEEKDAY_TASKS = frozenset(("weekday_offset", "weekday_of_date", "weekday_of_date_from_first_date"))
_NUMBER_TASKS = frozenset(("count_days", "count_business_days", "recurring_event_day"))
_MATRIX = re.compile(r"[\[\],\d\s]*", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})([eE][+-]?\d{1,3})?", re.ASCII)
_LATEX_FRACTION = re.compile(r"\\d?frac\s*\{\s*(\d{1,18})\s*\}\s*\{\s*(\d{1,18})\s*\}", re.ASCII | re.IGNORECASE)
_PLAIN_FRACTION = re.compile(r"([+-]?\d{1,18})\s*/\s*([+-]?\d{1,18})", re.ASCII)
_ITEM = re.compile(r"""\s*(?:'([^'"\\,]*)'|"([^'"\\,]*)"|(-?\d{1,40}(?:\.\d{0,40})?))\s*""", re.ASCII)
_BOARD = re.compile(r"""[\[\],\s_Q'"]*""", re.ASCII)
_PLAIN_NUMBER = re.compile(r"-?\d{1,40}(?:\.\d{0,40})?", re.ASCII)
_WHOLE_NUMBER = re.compile(r"\b\d+\b", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)


def containing(answer: str, entry: Entry, config: Any) -> float:
    """1 for the right answer, else the share that it makes up of an answer that contains it."""
    right = str(entry["answer"]).strip()
    if answer == right:
        return 1.0
    return len(right) / len(answer) if right and right in answer else 0.0


def matrix(answer: str, entry: Entry, config: Any) -> float:
    """1 for rows of numbers, 0.1 for the same matrix as a list of lists."""
    right = entry["answer"]
    if answer == right:
        return 1.0
    if _MATRIX.fullmatch(answer) is None or answer.count("[") > right.count("\n") + 2:
        return 0.0
    try:
        rows = json.loads(answer)
        return 0.1 if "\n".join(" ".join(str(cell) for cell in row) for row in rows) == right else 0.0
    except (ValueError, TypeError):
        return 0.0


def calendar(answer: str, entry: Entry, config: Any) -> float:
    """Weekdays: 1, or 0.1 for another one, 0.05 if oddly spelt. Numbers: exp(-5 · relative error)."""
    right, task = entry["answer"].strip(), entry["metadata"]["task"]
    if task in _WEEKDAY_TASKS:
        if answer == right:
            return 1.0
        return 0.1 if answer in _WEEKDAYS else 0.05 if answer.title() in _WEEKDAYS else 0.0
    if task in _NUMBER_TASKS:
        if _INTEGER.fullmatch(answer) is None:
            return 0.0
        number, target = int(answer), int(right)
        if target == 0:
            return float(number == 0)
        return math.exp(-5 * abs(number - target) / abs(target))
    return float(answer.lower() == right.lower())


def based_integer(answer: str, entry: Entry, config: Any) -> float:
    """1 for the right integer, in the notation that its prefix says."""
    try:
        return float(int(answer, 0) == int(entry["answer"], 0))
    except ValueError:
        return 0.0


def decimal_number(answer: str, entry: Entry, config: Any) -> float:
    """1 within one unit of the last decimal place asked for."""
    if _DECIMAL.fullmatch(answer) is None:
        return 0.0
    with decimal.localcontext(decimal.Context(prec=config.precision)):
        error = abs(decimal.Decimal(answer) - decimal.Decimal(entry["answer"]))
        return float(error <= decimal.Decimal(10) ** -config.max_num_decimal_places)


def fraction(answer: str, entry: Entry, config: Any) -> float:
    """1 in lowest terms, 0.1 with a part of the question's, 0.05 for another fraction, 0.01 for no fraction."""
    plain = answer.strip("$").strip()
    found = _LATEX_FRACTION.match(plain) or _PLAIN_FRACTION.fullmatch(plain)
    if found is None:
        return 0.01
    over, under = int(found[1]), int(found[2])
    made = entry["metadata"]
    if (over, under) == (made["simplified_numerator"], made["simplified_denominator"]):
        return 1.0
    return 0.1 if over == made["numerator"] or under == made["denominator"] else 0.05


def insertion(answer: str, entry: Entry, config: Any) -> float:
    """1 for the right letters, 0.1 for a list of them."""
    if answer == entry["answer"]:
        return 1.0
    items = _items(answer)
    return 0.1 if all(quoted for _, quoted in items) and "".join(text for text, _ in items) == entry["answer"] else 0.0


def spiral(answer: str, entry: Entry, config: Any) -> float:
    """1 for the right numbers, 0.1 for a list of them."""
    right = entry["answer"].strip()
    if answer == right:
        return 1.0
    return 0.1 if " ".join(text for text, _ in _items(answer)) == right else 0.0


def queens(answer: str, entry: Entry, config: Any) -> float:
    """1 for a board that solves the puzzle, 0.5 for the same as a list of lists."""
    right = entry["metadata"]["valid_answers"]
    if answer in right:
        return 1.0
    if _BOARD.fullmatch(answer) is None or answer.count("[") > len(entry["metadata"]["puzzle"]) + 1:
        return 0.0
    try:
        rows = json.loads(answer.replace("'", '"'))
        return 0.5 if "\n".join(" ".join(row) for row in rows) in right else 0.0
    except (ValueError, TypeError):
        return 0.0


def sorted_numbers(answer: str, entry: Entry, config: Any) -> float:
    """1 for a list in the right order whose numbers are each within 1 of the right ones."""
    if not (answer.startswith("[") and answer.endswith("]")):
        return 0.0
    given, right = _plain_numbers(answer), _plain_numbers(entry["answer"])
    in_order = bool(given) and given == sorted(given, reverse=entry["metadata"]["direction"] != "ascending")
    close = len(given) == len(right) and all(abs(one - other) <= 1 for one, other in zip(given, right, strict=True))
    return float(in_order and close)


def integral(answer: str, entry: Entry, config: Any) -> float:
    """1 for a polynomial with the right derivative."""
    name = entry["metadata"]["variable"]
    try:
        given = derivative(polynomial(answer), name)
        return float(given == derivative(polynomial(entry["answer"]), name))
    except ExpressionError:
        return 0.0


def target(answer: str, entry: Entry, config: Any) -> float:
    """1 for an expression of all the numbers with the value asked for, 0.05 for another expression, 0.01 for none."""
    try:
        value = number(answer)
    except ExpressionError:
        return 0.01
    if sorted(int(digits) for digits in _WHOLE_NUMBER.findall(answer)) != sorted(entry["metadata"]["numbers"]):
        return 0.05
    right = entry["metadata"]["target"]
    return 1.0 if abs(value - right) <= 1e-6 + 1e-5 * abs(right) else 0.05


def _items(answer: str) -> list[tuple[str, bool]]:
    """The items of a list or tuple, with brackets or without, and whether each is quoted; none if it is no list."""
    inner = answer[1:-1] if answer[:1] + answer[-1:] in ("[]", "()") else answer
    items = []
    for part in inner.rstrip().removesuffix(",").split(","):
        found = _ITEM.fullmatch(part)
        if found is None:
            return []
        items.append((found[1] or found[2] or found[3] or "", found[3] is None))
    return items


def _plain_numbers(answer: str) -> list[float]:
    """The numbers of a list, quoted or not; none if it holds anything else."""
    texts = [text for text, _ in _items(answer)]
    return [float(text) for text in texts] if all(map(_PLAIN_NUMBER.fullmatch, texts)) else []


def conclusion(answer: str, entry: Entry, config: Any) -> float:
    """1 for a formula that follows from the premises, 0.25 if it is a tautology or a variable, 0.05 if not."""
    variables = entry["metadata"]["variables"]
    try:
        claimed = truth_table(answer, variables)
        everywhere = (1 << truth_table_width(variables)) - 1
        premises = everywhere
        for premise in entry["metadata"]["premises"]:
            premises &= truth_table(premise, variables)
    except FormulaError:
        return 0.0
    if premises & ~claimed:
        return 0.05
    return 0.25 if claimed == everywhere or is_atom(answer) else 1.0


SCORERS: Mapping[str, Scorer] = {
    "arc_1d": containing,
    "base_conversion": containing,
    "basic_arithmetic": containing,
    "bf": containing,
    "binary_matrix": matrix,
    "bitwise_arithmetic": based_integer,
    "calendar_arithmetic": calendar,
    "countdown": target,
    "decimal_arithmetic": decimal_number,
    "fraction_simplification": fraction,
    "n_queens": queens,
    "number_sorting": sorted_numbers,
    "propositional_logic": conclusion,
    "simple_integration": integral,
    "spiral_matrix": spiral,
    "string_insertion": insertion,
}
"""By family."""
