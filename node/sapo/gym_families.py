"""The families of reasoning-gym: which are offered, which are not and why, and settings that small models can learn.

Offered is what made the same question in two processes with different hash seeds and different states of the global
random generators, for 24 seeds, in at most a quarter of a second each, gave 1.0 to its own answer where it has one and
less than a half to text that is none; `tests/node/sapo/sweep_families.py` measures that anew. A family that a later
release adds is not offered until somebody has looked at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = """
    ab acre advanced_geometry aiw arc_1d base_conversion basic_arithmetic bf binary_alternation binary_matrix
    bitwise_arithmetic boxnet caesar_cipher calendar_arithmetic chain_sum circuit_logic coin_flip
    color_cube_rotation complex_arithmetic count_bits count_primes countdown course_schedule cryptarithm
    decimal_arithmetic decimal_chain_sum dice emoji_mystery family_relationships fraction_simplification
    game_of_life gcd graph_color gsm_symbolic jugs kakurasu knights_knaves largest_island lcm
    leg_counting letter_counting letter_jumble mahjong_puzzle manipulate_matrix maze mini_sudoku modulo_grid
    n_queens needle_haystack number_filtering number_format number_sorting palindrome_generation
    palindrome_partitioning path_star polynomial_equations power_function prime_factorization products
    propositional_logic rearc rectangle_count rotate_matrix rotten_oranges rubiks_cube rush_hour self_reference
    sentence_reordering shortest_path simple_equations simple_geometry simple_integration spell_backward
    spiral_matrix string_insertion string_manipulation string_splitting string_synthesis sudoku survo syllogism
    time_intervals tower_of_hanoi tsumego word_sequence_reversal word_sorting
"""
OFFERED: tuple[str, ...] = tuple(_NAMES.split())

_HASH = "its questions follow the order of Python's sets, which differs between processes"
_GLOBAL = "it draws from the global random generator, so its questions differ between processes"
_SLOW = "it takes up to seconds to make a task"

REFUSED: Mapping[str, str] = {
    "arc_agi": "it reads its whole data set for every task, and its questions differ between processes",
    "codeio": "it executes programs of its data set to make a task, and its questions differ between processes",
    "composite": "it mixes other families; name those themselves, with weights",
    "figlet_font": "it reads all its fonts for every task",
    "futoshiki": _SLOW,
    "game_of_life_halting": "its scorer gives the whole reward to any text at all",
    "group_anagrams": "it reads its whole word list for every task",
    "intermediate_integration": _SLOW,
    "isomorphic_strings": _HASH,
    "knight_swap": "its solutions differ between processes, and a task takes up to half a minute",
    "list_functions": _GLOBAL,
    "polynomial_multiplication": _HASH,
    "number_sequence": "it takes minutes to make some of its tasks",
    "pool_matrix": "it sets the seed of numpy's global random generator, from which the policy may draw",
    "puzzle24": _SLOW,
    "quantum_lock": _SLOW,
    "ransom_note": _HASH,
    "sokoban": "making a task of a small board does not end",
    "word_ladder": "its answers differ between processes, and it reads its word list for every task",
    "zebra_puzzles": _SLOW,
}
"""The others, each with the reason why it is not."""

EASY: Mapping[str, Mapping[str, Any]] = {
    "ab": {"length": 4},
    "arc_1d": {"min_size": 8, "max_size": 10, "num_train": 2},
    "base_conversion": {"min_base": 2, "max_base": 4, "min_value": 0, "max_value": 15},
    "basic_arithmetic": {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 1,
        "operators": ["+", "-"],
        "allow_parentheses": False,
        "allow_negation": False,
    },
    "bf": {"difficulty": 1},
    "binary_alternation": {"max_n": 10},
    "binary_matrix": {"min_n": 2, "max_n": 3, "p_zero": 0.5},
    "bitwise_arithmetic": {"difficulty": 1},
    "boxnet": {"max_row_num": 1, "max_column_num": 2},
    "caesar_cipher": {"max_words": 3, "max_rotation": 1},
    "calendar_arithmetic": {"tasks": ["weekday_offset"], "offset_upper_bound": 7},
    "chain_sum": {"max_terms": 2, "max_digits": 1},
    "circuit_logic": {"max_terms": 3, "max_inputs": 2},
    "coin_flip": {"max_trials": 4},
    "color_cube_rotation": {"max_rotations": 1},
    "count_bits": {"max_n": 15},
    "count_primes": {"max_n": 20},
    "countdown": {"max_numbers": 4},
    "course_schedule": {"max_num_courses": 5, "max_num_prerequisites": 1, "max_cycle_length": 3},
    "cryptarithm": {"max_words": 2},
    "decimal_arithmetic": {
        "min_num_decimal_places": 1,
        "max_num_decimal_places": 1,
        "min_terms": 2,
        "max_terms": 2,
        "precision": 6,
    },
    "decimal_chain_sum": {"max_terms": 2, "max_digits": 1, "max_decimal_places": 1},
    "emoji_mystery": {"max_words_in_sentence": 3},
    "family_relationships": {"max_family_size": 4},
    "fraction_simplification": {"min_value": 1, "max_value": 10, "min_factor": 2, "max_factor": 5, "styles": ["plain"]},
    "gcd": {"max_value": 20},
    "graph_color": {"min_num_vertices": 4, "max_num_vertices": 4},
    "kakurasu": {"max_rows": 4, "max_cols": 4},
    "largest_island": {"max_rows": 5, "max_cols": 5, "max_num_islands": 2},
    "lcm": {"max_value": 10},
    "leg_counting": {"max_animals": 3, "max_instances": 1},
    "letter_counting": {"max_words": 5},
    "letter_jumble": {"max_words": 3},
    "mahjong_puzzle": {"max_num_rounds": 10},
    "manipulate_matrix": {"max_rows": 2, "max_cols": 2, "max_transforms": 1},
    "maze": {"max_dist": 5, "max_grid_size": 6},
    "mini_sudoku": {"max_empty": 8},
    "n_queens": {"max_remove": 1},
    "needle_haystack": {"max_num_statements": 10},
    "number_filtering": {"max_numbers": 3, "max_decimals": 0},
    "number_format": {"max_num_candidates": 2},
    "number_sorting": {"max_numbers": 3, "max_decimals": 0},
    "palindrome_generation": {"max_length": 3},
    "palindrome_partitioning": {"max_string_len": 5},
    "path_star": {"max_path_length": 3},
    "polynomial_equations": {"max_terms": 2, "max_value": 1, "max_degree": 1},
    "prime_factorization": {"max_value": 30},
    "products": {"max_digits": 1},
    "propositional_logic": {
        "min_vars": 2,
        "max_vars": 2,
        "min_statements": 2,
        "max_statements": 2,
        "min_complexity": 1,
        "max_complexity": 2,
    },
    "rearc": {"max_examples": 3},
    "rotate_matrix": {"max_n": 2},
    "rotten_oranges": {"max_n": 10},
    "rubiks_cube": {"max_scramble_steps": 3},
    "rush_hour": {"max_moves": 3},
    "sentence_reordering": {"max_words_in_sentence": 3},
    "shortest_path": {"max_rows": 5, "max_cols": 5},
    "simple_equations": {"max_terms": 2, "max_value": 1},
    "simple_geometry": {"max_sides": 3, "max_angle": 12},
    "simple_integration": {"max_terms": 2, "max_degree": 1, "max_bounds": 1},
    "spell_backward": {"max_word_len": 3},
    "spiral_matrix": {"max_n": 2},
    "string_insertion": {"max_string_length": 5},
    "string_manipulation": {"max_string_length": 5, "max_num_rules": 3},
    "string_splitting": {"max_initial_machines": 2},
    "string_synthesis": {"max_initial_blocks": 2},
    "sudoku": {"max_empty": 30},
    "survo": {"max_board_size": 4, "max_empty": 3, "max_num": 2},
    "tower_of_hanoi": {"max_disks": 4, "max_pegs": 3},
    "tsumego": {"max_board_size": 9},
    "word_sequence_reversal": {"max_words": 3},
    "word_sorting": {"max_words": 3, "max_word_length": 3},
}
"""The preset ``easy``: the smallest tasks that the family makes in variety, for those families that have such."""

NO_SETTINGS = frozenset({"seed", "size", "data_file"})
"""Parameters of generators that no config sets: what follows from the task, and a file that would be read. A swarm must
not choose which files of a node are read, and what is in them would be asked, and answered in front of all."""

LIMITS: Mapping[str, Mapping[str, float]] = {
    "calendar_arithmetic": {"year": 9000, "offset_upper_bound": 3650, "leap_year_range": 2000},
    "propositional_logic": {"max_vars": 6, "min_vars": 6},
}
"""The largest value of a setting, where the hardest level of the curriculum is not the bound to take."""
