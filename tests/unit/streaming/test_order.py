"""What comes next is what came after these two last time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import pytest

from fastpersist.streaming.order import UseOrder


def foretold(order: UseOrder, count: int) -> list[int]:
    return list(islice(order.foretell(), count))


def wrong_guesses(order: UseOrder, uses: Sequence[int]) -> int:
    """How many uses are not the one that was foretold right before."""
    wrong = 0
    for unit in uses:
        wrong += next(order.foretell()) != unit
        order.note(unit)
    return wrong


def test_first_it_is_the_order_of_registration_and_it_goes_round() -> None:
    order = UseOrder(4)
    assert foretold(order, 6) == [0, 1, 2, 3, 0, 1]
    order.note(2)
    assert foretold(order, 6) == [0, 1, 3, 2, 0, 1]


def test_a_norm_that_is_registered_behind_what_it_comes_before_changes_nothing_for_the_others() -> None:
    """Two layers of a Llama: attention, MLP, norm before the attention, norm before the MLP."""
    order = UseOrder(8)
    wrong = []
    for used in (2, 0, 3, 1, 6, 4, 7, 5):
        if foretold(order, 1) != [used]:
            wrong.append(used)
        order.note(used)
    assert wrong == [2, 3, 6, 7]  # the norms alone
    assert foretold(order, 3) == [2, 0, 3]


def test_of_no_units_nothing_is_foretold() -> None:
    assert foretold(UseOrder(0), 3) == []


def test_of_one_unit_it_comes_again() -> None:
    order = UseOrder(1)
    assert wrong_guesses(order, [0, 0, 0]) == 0
    assert foretold(order, 2) == [0, 0]


@pytest.mark.parametrize(
    "uses",
    [
        pytest.param([0, 1, 2, 3], id="as registered"),
        pytest.param([3, 1, 0, 2], id="in another order"),
        pytest.param([0, 1, 0, 2], id="a shared module"),
        pytest.param([0, 2, 1, 2, 3, 2], id="one between each two"),
        pytest.param([0, 1], id="the others are never used"),
    ],
)
def test_after_two_passes_every_pass_is_foretold(uses: list[int]) -> None:
    order = UseOrder(4)
    wrong_guesses(order, uses * 2)
    assert wrong_guesses(order, uses * 5) == 0
    assert foretold(order, 3 * len(uses)) == uses * 3


def test_one_pass_is_enough_without_shared_modules() -> None:
    order = UseOrder(4)
    wrong_guesses(order, [3, 1, 2, 0])
    assert wrong_guesses(order, [3, 1, 2, 0, 3, 1, 2, 0]) == 0


def test_an_encoder_that_runs_once_is_followed_by_cycles_of_the_decoder() -> None:
    encoder, decoder = [0, 1, 2], [3, 4, 5]
    order = UseOrder(6)
    assert wrong_guesses(order, encoder + decoder) == 0
    assert wrong_guesses(order, decoder) == 1  # back to the start of the decoder
    assert wrong_guesses(order, decoder * 10) == 0
    # The next text: only the switch to the encoder cannot be known.
    assert wrong_guesses(order, encoder + decoder * 3) <= 2


def test_an_early_exit_costs_a_guess_each_time_that_it_changes() -> None:
    whole, short = [0, 1, 2, 3], [0, 1]
    order = UseOrder(4)
    wrong_guesses(order, whole * 2)
    assert wrong_guesses(order, short) == 0
    assert wrong_guesses(order, short) == 1
    assert wrong_guesses(order, short * 10) == 0
    assert wrong_guesses(order, whole) <= 2
    assert wrong_guesses(order, whole * 4) <= 1
