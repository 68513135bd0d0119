"""Autocast: recipes that nest, in a thread, and recomputation under the recipe of the first forward."""

from __future__ import annotations

import threading

import pytest
import torch

from narrowgauge.spec.modules.autocast import at_exit, autocast, checkpoint, current, recomputing, remember
from narrowgauge.spec.modules.training import Float8CurrentScaling, MXFP8BlockScaling, TrainingRecipe

MX, CURRENT = MXFP8BlockScaling(), Float8CurrentScaling()


def test_recipes_nest_and_none_is_high_precision() -> None:
    assert current() is None
    with autocast(MX):
        assert current() is MX
        with autocast("Float8CurrentScaling"):
            assert current() == CURRENT
            with autocast(None):
                assert current() is None
            assert current() == CURRENT
        assert current() is MX
    assert current() is None


def test_an_exception_restores_the_recipe_of_before() -> None:
    with autocast(MX):
        with pytest.raises(KeyError), autocast(CURRENT):
            raise KeyError
        assert current() is MX
    with pytest.raises(KeyError), autocast(MX), autocast(CURRENT):
        raise KeyError
    assert current() is None


def test_another_thread_has_recipes_of_its_own() -> None:
    inside = threading.Event()
    leave = threading.Event()
    seen: list[TrainingRecipe | None] = []

    def other() -> None:
        seen.append(current())
        with autocast(CURRENT):
            inside.set()
            leave.wait(60)
            seen.append(current())

    with autocast(MX):
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(60)
        assert current() is MX
        leave.set()
        thread.join()
        assert current() is MX
    assert seen == [None, CURRENT]


def test_what_is_no_training_recipe_is_refused() -> None:
    with pytest.raises(TypeError, match="autocast takes a training recipe, the name of one or None, not Recipe"):
        autocast(MX.input).__enter__()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no training recipe is called 'mxfp8-e4m3'"):
        autocast("mxfp8-e4m3").__enter__()
    assert current() is None


# ---- at_exit ---------------------------------------------------------------------------------------------------------


def test_callbacks_run_in_order_after_the_outermost_autocast() -> None:
    called: list[str] = []

    class Caller:
        def __init__(self, name: str) -> None:
            self.name = name

        def call(self) -> None:
            assert current() is None
            called.append(self.name)

    first, second = Caller("first"), Caller("second")
    with autocast(MX):
        with autocast(None):
            at_exit(second.call)
        at_exit(first.call)
        at_exit(second.call)
        assert called == []
    assert called == ["second", "first"]
    with autocast(MX):
        pass
    assert called == ["second", "first"]


def test_an_exception_drops_the_callbacks() -> None:
    called: list[int] = []

    def fail(number: int) -> None:
        at_exit(lambda: called.append(number))
        raise KeyError

    with pytest.raises(KeyError), autocast(MX):
        fail(1)
    with autocast(MX):
        with pytest.raises(KeyError), autocast(CURRENT):
            fail(2)
        assert called == []
    assert called == [2]  # the outermost ended well


def test_a_callback_needs_an_autocast() -> None:
    message = "at_exit has no end of an autocast to wait for: no autocast is active in this thread"
    with pytest.raises(RuntimeError, match=message):
        at_exit(print)


# ---- checkpoint ------------------------------------------------------------------------------------------------------


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


@pytest.mark.long
def test_the_second_forward_is_under_the_recipe_of_the_first() -> None:
    seen: list[tuple[TrainingRecipe | None, bool]] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append((current(), recomputing()))
        return x * x

    with autocast(MX):
        y = checkpoint(block, leaf())
        assert not recomputing()
    with autocast(CURRENT):
        y.sum().backward()
        assert (current(), recomputing()) == (CURRENT, False)
    assert seen == [(MX, False), (MX, True)]


def test_what_was_remembered_comes_again_in_every_second_forward() -> None:
    found: list[list[int]] = []
    numbers = iter(range(100))

    def block(x: torch.Tensor) -> torch.Tensor:
        y = x
        found.append([])
        for _ in range(3):
            found[-1].append(remember(next(numbers)))
            y = y * y
        return y

    y = checkpoint(block, leaf()).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert found == [[0, 1, 2]] * 3
    assert remember(7) == 7


def test_checkpoints_in_a_checkpoint_remember_the_very_first() -> None:
    found: list[int] = []
    numbers = iter(range(100))

    def inner(x: torch.Tensor) -> torch.Tensor:
        found.append(remember(next(numbers)))
        return x * x * x

    def outer(x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(inner, x)
        assert isinstance(y, torch.Tensor)
        found.append(remember(next(numbers)))
        return y * y

    x = leaf()
    checkpoint(outer, x).sum().backward()
    assert found[:2] == [0, 1]
    assert len(found) > 2
    assert set(found) == {0, 1}
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2,), 6.0))
