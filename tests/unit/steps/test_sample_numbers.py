"""Random numbers of a step by sample: what a rank draws for its rows is what one process draws for them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import get_overridable_functions
from torch.utils.checkpoint import checkpoint

from lightning_lockstep import ConfigurationError
from lightning_lockstep.steps.sample_numbers import (
    DRAWING,
    BatchPlace,
    SampleNumbers,
    by_sample,
    shared,
)

SAMPLES = 13
WHOLE = range(SAMPLES)


def under(rows: range, function: Callable[..., Any], *args: Any, step: int = 5, seed: int = 1) -> Any:
    """Call a function in a step whose batch has these positions of an epoch."""
    with SampleNumbers(seed).step(BatchPlace(2, 3, rows.start, rows.step, len(rows)), step):
        return function(*args)


class Encoder(nn.TransformerEncoder):
    def __init__(self, batch_first: bool) -> None:
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.2, batch_first=batch_first, dtype=torch.float64)
        super().__init__(layer, 2, enable_nested_tensor=False)


class Weights(nn.MultiheadAttention):
    """Attention that returns its weights, whose dropout is on ``(samples * heads, length, length)``."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=True)[0]


def recurrent(dropout: float) -> Callable[[Tensor], Tensor]:
    network = nn.LSTM(16, 8, 2, dropout=dropout, batch_first=True, dtype=torch.float64)
    return lambda x: network(x)[0]


def attention(x: Tensor) -> Tensor:
    heads = x.view(len(x), -1, 4, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)


def lengths_first(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    with by_sample(dim=1):
        return function(x.transpose(0, 1)).transpose(0, 1)


def for_all(x: Tensor) -> Tensor:
    with shared():
        return x[:, torch.randperm(7)] * torch.rand(1) + F.dropout(torch.ones(16), 0.4) + LSTM(x).sum() * 0


SEQUENCE_FIRST, PLAIN = Encoder(batch_first=False), nn.Linear(16, 16, dtype=torch.float64)
LSTM = recurrent(0.3)
HELD: dict[str, Callable[[Tensor], Tensor]] = {
    "Dropout": lambda x: F.dropout(PLAIN(x), 0.3),
    "Dropout in place": lambda x: F.dropout(x.clone(), 0.3, True, True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0] + torch.native_dropout(x, 0.0, True)[0],
    "Dropout of all": lambda x: F.dropout(x, 1.0) + torch.rand_like(x),
    "Dropout1d": nn.Dropout1d(0.3),
    "Dropout2d": lambda x: F.dropout2d(x[..., None], 0.3),
    "AlphaDropout": nn.AlphaDropout(0.2),
    "FeatureAlphaDropout": nn.FeatureAlphaDropout(0.2),
    "MultiheadAttention": Weights(16, 4, 0.2, batch_first=True, dtype=torch.float64),
    "scaled_dot_product_attention": attention,
    "TransformerEncoder": Encoder(batch_first=True),
    "TransformerEncoder, lengths first": lambda x: lengths_first(x, SEQUENCE_FIRST),
    "by_sample(dim=1)": lambda x: lengths_first(x, lambda y: F.dropout(y, 0.3)),
    "drop-path": lambda x: x * (torch.rand(len(x), 1, 1) < 0.8),
    "diffusion": lambda x: x * torch.randint(0, 1000, (len(x),))[:, None, None] + torch.randn_like(x),
    "gumbel_softmax": F.gumbel_softmax,
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) + x.new_empty(len(x), 7, 1).bernoulli_(0.2),
    "uniform_, normal_, exponential_": lambda x: (
        torch.empty_like(x).uniform_(-2, 3) * torch.empty_like(x).normal_(1, 3) + torch.empty_like(x).exponential_()
    ),
    "normal of tensors": lambda x: torch.normal(x, x.abs()) + torch.distributions.Normal(x, 1.0).rsample(),
    "whole numbers": lambda x: torch.randint_like(x, 9) + torch.empty(len(x), 7, 16, dtype=torch.int64).random_(2, 6),
    "half precision": lambda x: F.dropout(x.bfloat16(), 0.3) + torch.rand_like(x.half()),
}  # fmt: skip
SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "a single number": lambda x: x * torch.rand(()) + random.random() + numpy.random.rand(),
    "shared()": for_all,
    "LSTM without dropout": recurrent(0.0),
    "a generator of its own": lambda x: x * torch.rand(1, generator=torch.Generator().manual_seed(4)),
}


def inputs() -> Tensor:
    return torch.randn(SAMPLES, 7, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("name", [*HELD, *SHARED])
def test_rows_have_the_numbers_of_their_samples_on_any_number_of_ranks(name: str) -> None:
    function, x = {**HELD, **SHARED}[name], inputs()
    whole = under(WHOLE, function, x)
    for ranks, rank in product((2, 3, 4), range(4)):
        rows = range(rank % ranks, SAMPLES, ranks)
        assert torch.allclose(under(rows, function, x[rows.start :: ranks]), whole[rows.start :: ranks], 0, 1e-12)
    others = under(range(50, 50 + SAMPLES), function, x)
    assert torch.equal(others, whole) is (name in SHARED)


def test_two_ranks_have_different_masks_and_steps_different_numbers() -> None:
    x = torch.ones(SAMPLES, 64)
    seen = [
        under(rows, F.dropout, x, step=step, seed=seed)
        for rows, step, seed in ((WHOLE, 5, 1), (range(13, 26), 5, 1), (WHOLE, 6, 1), (WHOLE, 5, 2))
    ]
    assert not any(torch.equal(one, other) for i, one in enumerate(seen) for other in seen[:i])


def test_a_longer_row_begins_with_the_numbers_of_a_shorter_one() -> None:
    short, long = (under(WHOLE, F.dropout, torch.ones(SAMPLES, 4, n, n)) for n in (7, 9))
    assert torch.equal(short, long[:, :, :7, :7])


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "lengths first": (lambda x: F.dropout(x.transpose(0, 1)), "dropout draws random numbers of shape (7, 13, 16)"),
    "flattened": (lambda x: F.dropout(x.flatten(0, 1)), "dropout draws random numbers of shape (91, 16)"),
    "encoder": (lambda x: SEQUENCE_FIRST(x.transpose(0, 1)), "dropout draws random numbers of shape (7, 13, 16)"),
    "attention": (
        lambda x: HELD["MultiheadAttention"](x.flatten(0, 1)[None]),
        "multi_head_attention_forward draws for a query of shape (91, 1, 16)",
    ),
    "rand(1)": (lambda x: torch.rand(1), "rand draws random numbers of shape (1,)"),
    "LSTM": (LSTM, "lstm draws in its dropout"),
    "randperm": (lambda x: torch.randperm(len(x)), "randperm draws by the operator randperm"),
    "multinomial": (lambda x: torch.multinomial(x.abs()[:, 0], 1), "multinomial draws by the operator multinomial"),
    "rrelu": (lambda x: F.rrelu(x, training=True), "rrelu draws by the operator rrelu_with_noise"),
    "cauchy_": (lambda x: x.clone().cauchy_(), "cauchy_ draws by the operator cauchy_"),
    "unseen": (lambda x: nn.init.normal_(torch.empty(3)), "training_step has drawn random numbers in a way"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_is_refused_with_its_name(name: str) -> None:
    function, text = REFUSED[name]
    with pytest.raises(ConfigurationError, match=re.escape(text)) as error:
        under(WHOLE, function, inputs())
    assert ("`shared()`" in str(error.value)) is (name != "unseen")
    assert ("`by_sample(dim=1)`" in str(error.value)) is ("of shape" in text and "query" not in text)


def test_all_functions_of_torch_that_draw_are_known() -> None:
    """An operator says that it draws. Private ones and those of a vendor are called by functions that are known."""
    known = {getattr(one, "__name__", "") for one in DRAWING}
    draws = set()
    for owner in (torch, Tensor):
        for function in get_overridable_functions()[owner]:
            name = getattr(function, "__name__", "")
            packet = getattr(torch.ops.aten, name, None) if name and not name.startswith("__") else None
            overloads = [getattr(packet, one) for one in packet.overloads()] if packet is not None else []
            if any(torch.Tag.nondeterministic_seeded in one.tags for one in overloads):
                draws.add(name)
    inside = {name for name in draws if name.startswith(("_", "miopen", "rrelu_with_noise"))}
    assert draws - inside <= known


# -- backward ------------------------------------------------------------------------------------------

LAYERS = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3)) for _ in range(3)).double()


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.draw = draw
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.draw(gradient), None


def gradient(around: Callable[[nn.Module, Tensor], Tensor], draw: Callable[[Tensor], Tensor] = Tensor.clone) -> Tensor:
    """Return a gradient of a step whose layers are called in a way of their own."""
    LAYERS.zero_grad()
    numbers, x = SampleNumbers(1), inputs().requires_grad_()
    with numbers.step(BatchPlace(2, 3, 0, 1, SAMPLES), 5):
        y = DrawsInBackward.apply(x, draw)
        for layer in LAYERS:
            y = around(layer, y)
    with numbers.backward():
        y.square().sum().backward()
    assert x.grad is not None
    return x.grad


def held_for_all(layer: nn.Module, x: Tensor) -> Tensor:
    with by_sample(dim=1):
        return checkpoint(lambda y: F.dropout(y.transpose(0, 1), 0.3).transpose(0, 1), x, use_reentrant=False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_repeats_the_numbers(reentrant: bool) -> None:
    plain = gradient(lambda layer, x: layer(x))
    assert torch.equal(gradient(lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant)), plain)


def test_a_dimension_said_around_a_checkpoint_holds_within_it() -> None:
    assert gradient(held_for_all).isfinite().all()


@pytest.mark.parametrize(
    ("keeps", "draw", "text"),
    [
        (False, Tensor.clone, "dropout draws random numbers in backward that its forward has not drawn"),
        (True, torch.rand_like, "rand_like draws random numbers in backward"),
        (True, nn.init.normal_, "the backward of training_step has drawn random numbers in a way"),
    ],
)
def test_other_draws_in_backward_are_refused(keeps: bool, draw: Callable[[Tensor], Tensor], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        gradient(lambda layer, x: checkpoint(layer, x, use_reentrant=False, preserve_rng_state=keeps), draw)


def test_generators_are_as_they_were() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), numpy.random.random(), float(torch.rand(()))

    def seed() -> None:
        random.seed(5)
        numpy.random.seed(5)
        torch.manual_seed(5)

    seed()
    wanted = drawn()
    seed()
    under(WHOLE, lambda x: F.dropout(x) + random.random() + numpy.random.random(), inputs())
    assert drawn() == wanted


# -- compiled ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Dropout", "drop-path", "Dropout2d", "TransformerEncoder"])
def test_compiled_code_draws_the_same(name: str) -> None:
    torch._dynamo.reset()
    compiled, x = torch.compile(HELD[name], backend="eager"), inputs()
    for step in (5, 6):
        assert torch.equal(under(WHOLE, compiled, x, step=step), under(WHOLE, HELD[name], x, step=step))


def test_draws_in_a_checkpoint_within_compiled_code_are_refused_or_repeated() -> None:
    """Torch 2.9 repeats them; in later releases the backward does not see the mode."""
    torch._dynamo.reset()

    def gradient_of(function: Callable[[Tensor], Tensor]) -> Tensor | None:
        numbers, x = SampleNumbers(1), inputs().requires_grad_()
        with numbers.step(BatchPlace(2, 3, 0, 1, SAMPLES), 5):
            y = function(x)
        with numbers.backward():
            y.backward()
        return x.grad

    def function(x: Tensor) -> Tensor:
        return checkpoint(HELD["Dropout"], x, use_reentrant=False).square().sum()

    try:
        found = gradient_of(torch.compile(function, backend="eager"))
    except ConfigurationError as error:
        assert "outside torch" in str(error)
    else:
        assert torch.equal(found, gradient_of(function))


def test_a_compiler_records_no_cuda_graph_with_a_dropout() -> None:
    """It asks this with ``mode="reduce-overhead"``, and runs such an operator between two recorded parts."""
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    torch._dynamo.reset()
    graphs: list[Any] = []
    compiled = torch.compile(HELD["Dropout"], backend=lambda graph, _: graphs.append(graph) or graph)
    under(WHOLE, compiled, inputs())
    with torch._inductor.config.patch(graph_partition=False):  # else torch 2.9 asks later, for each part
        refused = get_first_incompatible_cudagraph_node(graphs[0])
    assert refused is not None and refused.target is torch.ops.lockstep.dropout_noise.default


# -- quality -------------------------------------------------------------------------------------------

ROWS, COLUMNS = 64, 4096


def stacked(kind: str) -> Tensor:
    """Return numbers of ``(rows, 8 * columns)``: of one step and of another, of four calls each."""

    def draw() -> Tensor:
        x = torch.empty(ROWS, COLUMNS, dtype=torch.float64)
        drawn = {
            "uniform": torch.rand_like,
            "dropout": lambda x: (F.dropout(torch.ones_like(x), 0.25) == 0).double(),
            "normal": torch.randn_like,
            "whole": lambda x: torch.randint(0, 8, (ROWS, COLUMNS)).double(),
            "torch": lambda x: torch.rand(
                x.shape, generator=torch.Generator().manual_seed(random.getrandbits(60)), dtype=x.dtype
            ),
        }[kind]
        return torch.cat([drawn(x) for _ in range(4)], 1)

    return torch.cat([under(range(ROWS), draw, step=step) for step in (1, 2)], 1)


MOMENTS = {
    "uniform": (1 / 2, 1 / 12),
    "dropout": (1 / 4, 3 / 16),
    "normal": (0, 1),
    "whole": (3.5, 63 / 12),
    "torch": (1 / 2, 1 / 12),
}


@pytest.mark.parametrize("kind", MOMENTS)
def test_numbers_are_random_beside_torchs_own(kind: str) -> None:
    """Each bound is five standard deviations, or a p-value of 1e-5, of what independent numbers give."""
    mean, variance = MOMENTS[kind]
    found = stacked(kind)
    assert abs(float(found.mean()) - mean) < 5 * (variance / found.numel()) ** 0.5
    assert abs(float(found.var()) / variance - 1) < 5 * (2.0 / found.numel()) ** 0.5 * 1.3
    normed = (found - mean) / variance**0.5
    rows = (normed @ normed.T / normed.shape[1]).fill_diagonal_(0) * normed.shape[1] ** 0.5
    assert float(rows.abs().max()) < 5  # of 2,016 pairs
    calls = normed.view(ROWS, 8, COLUMNS).transpose(0, 1).flatten(1)  # of calls and steps
    calls = (calls @ calls.T / calls.shape[1]).fill_diagonal_(0) * calls.shape[1] ** 0.5
    assert float(calls.abs().max()) < 5
    columns = normed.sum(0) / ROWS**0.5
    assert abs(float(columns.var()) - 1) < 5 * (2 / columns.numel()) ** 0.5
    if kind in ("uniform", "torch", "whole"):
        cells = (found * 8).long() if kind != "whole" else found.long()
        for step in (1, 64 // 2):  # neighbours in a row, and rows below each other
            pairs = cells[:, 1:] * 8 + cells[:, :-1] if step == 1 else cells[step:] * 8 + cells[:-step]
            counts = pairs.flatten().bincount(minlength=64).double()
            expected = counts.sum() / 64
            assert float(((counts - expected) ** 2 / expected).sum()) < 63 + 5 * (2 * 63) ** 0.5
