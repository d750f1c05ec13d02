"""Scorers of our own for the nine families of the paper: they evaluate nothing and take time linear in the text.

Each gives what `score_answer` of reasoning-gym 0.1.25 gives to an answer of the form that the question asks for, right
or wrong, and partial rewards where that does. They differ where the library is lenient beyond that form, or harmful:

* all: an answer is at most `ANSWER_LIMIT_CHARS` long; spaces around it do not count.
* binary_matrix: the 0.1 for a Python list of lists is given to a list of lists of plain numbers; the library evaluates
  the answer as a Python expression, whatever it says.
* calendar_arithmetic: where the right number is negative (an event that does not happen: -1), the error counts from
  its absolute value; the library gives exp of a positive number, rewards far above 1, to wrong answers.
* decimal_arithmetic: plain decimal notation with at most three digits of exponent.
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

from shoal.node.sapo.scorers_logic import FormulaError, is_atom, truth_table, truth_table_width

__all__ = ["ANSWER_LIMIT_CHARS", "SCORERS", "SCORERS_VERSION"]

SCORERS_VERSION = 1
"""Part of each family's version: rewards of other versions do not mix."""

ANSWER_LIMIT_CHARS = 8192

Entry = Mapping[str, Any]
"""What reasoning-gym makes for a task: question, answer, metadata."""
Scorer = Callable[[str, Entry, Any], float]
"""(answer, entry, the generator's config) to a reward in [0, 1]."""

_WEEKDAYS = frozenset(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"))
_WEEKDAY_TASKS = frozenset(("weekday_offset", "weekday_of_date", "weekday_of_date_from_first_date"))
_NUMBER_TASKS = frozenset(("count_days", "count_business_days", "recurring_event_day"))
_MATRIX = re.compile(r"[\[\],\d\s]*", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})([eE][+-]?\d{1,3})?", re.ASCII)
_LATEX_FRACTION = re.compile(r"\\d?frac\s*\{\s*(\d{1,18})\s*\}\s*\{\s*(\d{1,18})\s*\}", re.ASCII | re.IGNORECASE)
_PLAIN_FRACTION = re.compile(r"([+-]?\d{1,18})\s*/\s*([+-]?\d{1,18})", re.ASCII)
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
    "calendar_arithmetic": calendar,
    "decimal_arithmetic": decimal_number,
    "fraction_simplification": fraction,
    "propositional_logic": conclusion,
}
"""By family."""
