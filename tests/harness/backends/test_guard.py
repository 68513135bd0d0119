"""Guard zones and poison: writes and reads outside of tensors, and unwritten elements."""

import ctypes
import subprocess
import sys
from itertools import count

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.harness.backends.guard import POISON, Guard, unwritten
from narrowgauge.harness.backends.guarded_memory import CHUNK, ZONE
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from tests.harness.sample_backends import QUANTIZE, backend

X = torch.arange(12.0).view(3, 4)

ALLOCATIONS = {
    "empty": lambda x: torch.empty(3, 4),
    "empty_like": torch.empty_like,
    "empty_like of a transpose": lambda x: torch.empty_like(x.T),
    "empty_strided": lambda x: torch.empty_strided((3, 4), (1, 3)),
    "empty_permuted": lambda x: torch.empty_permuted((3, 4), (1, 0)),
    "empty of a named device": lambda x: torch.empty(3, 4, device="cpu"),
    "empty of another dtype": lambda x: torch.empty_like(x, dtype=torch.uint8),
    "empty scalar": lambda x: torch.empty(()),
    "new_empty": lambda x: x.new_empty(3, 4),
    "new_empty_strided": lambda x: x.new_empty_strided((3, 4), (4, 1)),
    "Tensor": lambda x: torch.Tensor(3, 4),
    "zeros": lambda x: torch.zeros(3, 4),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda x: x.new_zeros(3, 4),
    "ones": lambda x: torch.ones(3, 4),
    "ones_like": torch.ones_like,
    "new_ones": lambda x: x.new_ones(3, 4),
    "full": lambda x: torch.full((3, 4), 7.0),
    "full_like": lambda x: torch.full_like(x, 7.0),
    "new_full": lambda x: x.new_full((3, 4), 7.0),
}
every_allocation = pytest.mark.parametrize("allocate", ALLOCATIONS.values(), ids=ALLOCATIONS)


def within(work, poison=0xA5, x=X):
    """The guard and what `work` gave, given a guarded copy of x."""
    guard = Guard(poison)
    guard.place_inputs({"x": x})
    given = guard.inputs_on(x.device)["x"]
    with guard:
        result = work(given)
    return guard, result


def said(guard):
    """Every sentence of a guard."""
    return [text for texts in guard.violations() for text in texts]


def put(tensor, offset, data=b"\x01\x02\x03"):
    """Write bytes as a kernel does, at a distance from the tensor's address."""
    ctypes.memmove(tensor.data_ptr() + offset, data, len(data))


# Places of writes.


@every_allocation
def test_a_write_behind_a_tensor_is_seen(allocate):
    guard, out = within(allocate)
    put(out, out.numel() * out.element_size())
    assert said(guard) == [f"3 bytes behind a tensor of shape {tuple(out.shape)} were written"]


@every_allocation
def test_a_write_before_a_tensor_is_seen(allocate):
    guard, out = within(allocate)
    put(out, -3)
    assert said(guard) == [f"3 bytes before a tensor of shape {tuple(out.shape)} were written"]


@pytest.mark.parametrize(
    ("name", "value"),
    [(n, v) for prefix, v in (("zeros", 0.0), ("ones", 1.0), ("full", 7.0)) for n in ALLOCATIONS if prefix in n],
)
def test_what_torch_fills_is_filled(name, value):
    _, out = within(ALLOCATIONS[name])
    assert bool((out == value).all())


@pytest.mark.parametrize("offset", [1, ZONE - 3])
def test_the_whole_zone_is_watched(offset):
    guard, out = within(lambda x: torch.empty(3, 4))
    put(out, 48 + offset)
    put(out, -3 - offset)
    assert [text.split(" a ")[0] for text in said(guard)] == ["3 bytes before", "3 bytes behind"]


def test_storages_are_those_of_new_tensors():
    """A kernel may count from the begin of the storage of a tensor of its own, and torch refuses views outside."""

    def work(x):
        out = torch.empty(8)
        assert (out.storage_offset(), out.untyped_storage().nbytes()) == (0, 32)
        out.as_strided((2, 2), (4, 2), 1).fill_(5)
        with pytest.raises(RuntimeError, match="out of bounds"):
            out.as_strided((9,), (1,))
        return out

    guard, out = within(work)
    assert out[1::2].tolist() == [5.0] * 4
    assert said(guard) == []


@pytest.mark.parametrize(
    "grow",
    [
        lambda x, kept: kept.resize_(40),
        lambda x, kept: kept.resize_as_(torch.ones(40)),
        lambda x, kept: torch.cat([kept, torch.ones(36)], out=kept.new_empty(7)),
        lambda x, kept: torch.add(torch.ones(40), 1, out=torch.empty(3)),
    ],
    ids=["resize_", "resize_as_", "cat", "add"],
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_tensors_grow(grow):
    """A workspace that grows is no write behind a tensor."""

    def work(x):
        kept, behind = torch.full((4,), 3.0), torch.full((4,), 7.0)
        grown = grow(x, kept)
        grown[4:] = 1
        return grown, behind

    guard, (grown, behind) = within(work)
    assert grown.tolist() == [grown[0].item()] * 4 + [1.0] * 36
    assert behind.tolist() == [7.0] * 4
    assert said(guard) == []


def test_writing_the_poison_itself_is_seen_in_another_run():
    for poison in POISON[:2]:
        guard, out = within(lambda x: torch.empty(8), poison)
        put(out, 32, bytes([POISON[0]]))
        assert len(said(guard)) == (poison != POISON[0])


def test_a_change_of_an_input_is_seen():
    guard, _ = within(lambda x: x[1].neg_())
    assert said(guard) == ["4 bytes of input x were changed"]  # of four floats, their signs


def test_tensors_that_share_an_allocation_have_separate_zones():
    guard, made = within(lambda x: [torch.empty(n, dtype=torch.uint8) for n in (1, 513, 40, 1 << 20, 7)])
    small = [t.data_ptr() for t in made if t.numel() < 1 << 20]
    assert max(small) - min(small) < CHUNK["cpu"]
    assert len({t.untyped_storage().data_ptr() for t in made}) == len(made)
    for t in made:
        put(t, t.numel(), b"\1")
    assert said(guard) == [f"1 bytes behind a tensor of shape ({t.numel()},) were written" for t in made]
    assert [t._version for t in (made[0].add_(1), made[1])] == [1, 0], "a change of one is none of another"


VIEWS = {
    "a transpose": X.T, "every second column": torch.arange(24.0).view(3, 8)[:, ::2],
    "rows with padding": torch.arange(30.0).view(3, 10)[:, 2:6], "three dimensions": torch.zeros(2, 5, 9)[:, :, ::3],
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_is_given_as_a_view(view):
    guard, given = within(lambda x: x, x=view)
    assert (given.shape, given.stride()) == (view.shape, view.stride())
    assert torch.equal(given, view)
    assert said(guard) == []


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_what_surrounds_a_view_is_watched(view):
    last = sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))
    guard, _ = within(lambda x: (put(x, 4 * last + 4), put(x, -3)), x=view)
    assert said(guard) == ["3 bytes before input x were written", "3 bytes behind input x were written"]
    guard, _ = within(lambda x: x.add_(1), x=view)
    assert "bytes of input x were changed" in said(guard)[0]


@pytest.mark.parametrize("poison", POISON)
def test_between_the_elements_of_a_view_is_poison_and_stays(poison):
    view = VIEWS["every second column"]
    guard, given = within(lambda x: put(x, 4) or x, poison, view)
    assert said(guard) == ["3 bytes of input x were changed"]
    gaps = given.as_strided((3, 3), (8, 2), given.storage_offset() + 1).contiguous().view(torch.uint8)
    assert bool((gaps[1:] == poison).all())


# Unguarded memory.


@pytest.mark.long
def test_allocations_import_no_compiler_of_torch():
    """sympy takes 0.3 s and torch._dynamo a second, in every kernel host."""
    code = """
import sys
from tests.harness.backends.test_guard import ALLOCATIONS, within

for allocate in ALLOCATIONS.values():
    within(allocate)
print(sorted({"sympy", "torch._dynamo"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_nothing_is_guarded_once_the_run_is_over():
    guard = Guard(0xA5)
    with pytest.raises(ZeroDivisionError), guard:
        1 / 0  # noqa: B018
    put(torch.empty(1024), 0)
    assert said(guard) == []


@pytest.mark.long
@pytest.mark.skipif(
    not hasattr(TorchDispatchMode, "ignore_compile_internals"), reason="this torch compiles nothing within any guard"
)
def test_a_compiled_function_runs_compiled():
    runs = []

    def compiler(graph, _):
        def compiled(*arguments):
            runs.append(1)
            return graph(*arguments)

        return compiled

    double = torch.compile(lambda x: x * 2, backend=compiler)
    _, out = within(double)
    assert torch.equal(out, X * 2)
    assert runs == [1]


# Never written.


def test_unwritten_elements_hold_the_poison_of_both_runs():
    first, second = (torch.full((4,), p, dtype=torch.uint8).view(torch.int16) for p in POISON[:2])
    assert unwritten(first, second, POISON[:2]) == 2
    first[0] = second[0] = 5
    assert unwritten(first, second, POISON[:2]) == 1
    second[1] = 5  # written in one run is written
    assert unwritten(first, second, POISON[:2]) == 0
    assert unwritten(first[:0], second[:0], POISON[:2]) == 0


# As a verdict: the stages `memory` and `repeat` of a case.


def judged(case=QUANTIZE, **doors):
    record = run_case(case, backend(**doors))
    return record.verdict, record.stage, record.message


def with_own_memory(spoil):
    """A quantize that writes its codes into torch.empty, then spoils something: spoil(codes, x)."""

    def quantize(x, recipe):
        q = reference.quantize(x, recipe)
        codes = torch.empty_like(q.codes).copy_(q.codes)
        spoil(codes, x)
        return codes, q.scales, q.amax

    return quantize


def test_leaving_elements_unwritten():
    def quantize(x, recipe):
        q = reference.quantize(x, recipe)
        codes = torch.empty_like(q.codes)
        codes[:-1] = q.codes[:-1]
        return codes, q.scales, q.amax

    assert judged(quantize=quantize) == ("fail", "repeat", "repeat: 24 of 768 elements of codes were never written")


def test_reading_beyond_the_input():
    def spoil(codes, x):
        beyond = ctypes.c_uint8.from_address(x.data_ptr() + x.numel() * x.element_size())
        codes[3, 5] = beyond.value & 0x77

    assert judged(quantize=with_own_memory(spoil)) == (
        "fail", "repeat", "repeat: 1 of 768 elements of codes differ between first run and second run: they depend on "
        "bytes outside the inputs, or on memory that nobody wrote",
    )  # fmt: skip


def test_an_amax_that_is_given_now_and_then():
    calls = count()

    def quantize(x, recipe):
        q = reference.quantize(x, recipe)
        return q.codes, q.scales, q.amax if next(calls) else None

    message = "repeat: amax is given in one of first run and second run only: the same run again gives other bytes"
    assert judged(quantize=quantize) == ("fail", "repeat", message)


def test_every_variation_is_compared_with_the_first():
    calls = count()
    names = {f"order {i}": torch.no_grad for i in range(3)}
    third = with_own_memory(lambda codes, x: codes.add_(next(calls) == 2))
    message = "repeat: 768 of 768 elements of codes differ between order 0 and order 2: run again, they agree"
    assert judged(quantize=third, variations=lambda device: names) == ("fail", "repeat", message)


def test_a_backend_that_always_gives_the_same_tensor_declares_it():
    workspace = torch.zeros(32, 24, dtype=torch.uint8)

    def quantize(x, recipe):
        q = reference.quantize(x, recipe)
        return workspace.copy_(q.codes), q.scales, q.amax

    message = "memory: the first result of quantize is overwritten by a later call"
    assert judged(quantize=quantize) == ("fail", "memory", message)
    assert judged(quantize=quantize, declares={"results": "reused"}) == ("pass", "", "")


def test_inputs_keep_their_offset_and_equal_inputs_share_memory() -> None:
    offset = torch.zeros(9, dtype=torch.bfloat16)[1:].fill_(3)
    pitched = torch.zeros(4, 8)[:, :5].fill_(2)
    guard = Guard(POISON[0])
    guard.place_inputs({"x": offset, "a": pitched, "b": pitched})
    with guard:
        placed = guard.inputs_on(torch.device("cpu"))
        assert torch.equal(placed["x"], offset)
        assert (placed["x"].data_ptr() - placed["a"].data_ptr()) % 512 in (2, 510)
        assert placed["a"].stride() == (8, 1)
        assert [placed[name].storage_offset() for name in ("x", "a")] == [1, 0]
        assert placed["a"].data_ptr() == placed["b"].data_ptr()
    assert guard.violations() == ([], [])
    with guard:
        guard.inputs_on(torch.device("cpu"))["b"][0, 0] = 5
    assert guard.violations()[1]
