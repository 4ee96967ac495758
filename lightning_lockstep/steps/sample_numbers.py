"""Random numbers of a training step by sample: row ``s`` of a tensor has those of sample ``s``, on any number of ranks.

A number is a hash of the seed, the epoch, the position of the sample in the epoch's order, the call and the place in
the row. A call has its key from torch's own generator, which is seeded by the optimizer step. So activation
checkpointing, which restores that generator, repeats the numbers, and all micro-batches of an optimizer step have the
same keys. Nothing is sent. What cannot be held is refused, and a draw that was not seen is found after the step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from math import pi
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lockstep.distributed.coordination.global_norm import global_batch_norm
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.patching import replaced
from lightning_lockstep.steps.snapshot import (
    FACTORS,
    gpu_state,
    kept_generators,
    mixed,
    seed_generators,
    torch_seeded,
)

# -- What a model says about its random tensors --

_dims: list[int | None] = [0]  # the dimension of the samples; None: all samples share the numbers


@contextmanager
def by_sample(*, dim: int) -> Iterator[None]:
    """Say in which dimension the samples of random tensors are, if it is not the first, in the body.

    With ``random_numbers="of_sample"`` each sample of a training step has random numbers of its own, and a tensor of
    random numbers has one row for each of them. Elsewhere this does nothing.

    Args:
        dim: The dimension, such as 1 in tensors of shape ``(length, batch, width)``.

    Yields:
        Nothing.

    Ranks: each, alone; nothing is sent.
    """
    yield from _within(dim)


@contextmanager
def shared() -> Iterator[None]:
    """Say that the random tensors of the body are for all samples together, such as one permutation for the batch.

    With ``random_numbers="of_sample"`` all ranks then draw the same numbers. Elsewhere this does nothing.

    Yields:
        Nothing.

    Ranks: all draw tensors of the same shapes, in the same order; nothing is sent.
    """
    yield from _within(None)


def _within(dim: int | None) -> Iterator[None]:
    _dims.append(dim)
    try:
        yield
    finally:
        _dims.pop()


# -- The mode of training steps --


class BatchPlace(NamedTuple):
    """Which samples of an epoch a rank's part of a global micro-batch has."""

    epoch: int
    number: int  # of the global micro-batch in the epoch
    first: int  # position of this rank's first sample in the epoch's order
    stride: int  # from one of its samples to the next
    samples: int  # of this rank's batch


class SampleNumbers(TorchFunctionMode):
    """The mode of training steps and their backward: random numbers by sample, batch norm of the global batch."""

    # A mode that sees every operator below torch's functions costs 4 us for each of them, so it is on only
    # within the functions that are known to draw. This one costs 1.4 us a function.

    def __init__(self, seed: int, *, numbers: bool = True, norm: bool = False) -> None:
        super().__init__()
        self._seed, self.of_sample = seed, numbers
        self._watched = (DRAWING if numbers else set()) | ({F.batch_norm} if norm else set())
        self._step: _Step  # the last one, whose backward comes later; set as a step begins
        self._is_on = False

    @contextmanager
    def step(
        self, place: BatchPlace, optimizer_step: int, has_samples: bool = True, device: Any = "cpu"
    ) -> Iterator[None]:
        """Be on while a rank runs a training step forward; raise if a draw was not seen."""
        step = _Step(self._seed, place, has_samples, device)
        with ExitStack() as stack:
            if self.of_sample:
                stack.enter_context(self._drawing(step, optimizer_step))
            if self._is_on:  # in manual optimization a step may be run again within a step
                stack.enter_context(replaced(self, _step=step))
            else:
                self._step = step
                stack.enter_context(self._in_engine())
                stack.enter_context(replaced(self, _is_on=True))
                stack.enter_context(self)
            yield

    @contextmanager
    def _drawing(self, step: _Step, optimizer_step: int) -> Iterator[None]:
        """Seed what the body draws, and raise if it has drawn something unseen."""
        global _current
        _current = self
        key = mixed(self._seed, optimizer_step, 1)
        with kept_generators():
            seed_generators(key)
            gpu = gpu_state()
            yield
            numbers = torch.Generator().manual_seed(key)
            torch.empty(len(step.calls), dtype=torch.int64).random_(generator=numbers)
            _check_seen(numbers.get_state(), gpu, "training_step")

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Be on in the backward of a step, where checkpointed parts are computed and draw again."""
        if self._is_on:  # manual optimization
            yield
            return
        state, gpu = torch.get_rng_state(), gpu_state()
        with self._in_engine():
            yield
        if self.of_sample:
            _check_seen(state, gpu, "the backward of training_step")

    @contextmanager
    def _in_engine(self) -> Iterator[None]:
        """Be on within autograd's engine."""
        # A mode sees `Tensor.backward` and `torch.autograd.backward` as functions, within which it is off. So it is
        # entered in the private function that they and `torch.autograd.grad` call.
        engine = torch.autograd._engine_run_backward

        def run(*args: Any, **kwargs: Any) -> Any:
            with replaced(self._step, in_backward=True), self:
                return engine(*args, **kwargs)

        with replaced(torch.autograd, _engine_run_backward=run):
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._watched:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func is not F.batch_norm and not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        # Dynamo traces a mode. Dropout becomes an operator, and all else runs between two compiled parts.
        if torch.compiler.is_compiling() and func is F.dropout:
            return _dropout(_noise_operator, *args, **kwargs)
        # Once it is imported, dynamo would also compile what runs between them.
        may_compile = torch.compiler.is_compiling() or "torch._dynamo" in sys.modules
        return (_uncompiled if may_compile else SampleNumbers._run)(self, func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function that is watched, not compiled."""
        if func is F.batch_norm:
            return global_batch_norm(*args, **kwargs, counts=self._step.has_samples)
        if func is F.dropout:
            return _dropout(_noise, *args, **kwargs)
        call = self._step.call(getattr(func, "__name__", str(func)), _dims[-1])
        if call.dim is None:
            with torch_seeded(call.key):
                return func(*args, **kwargs)
        if func in _RECURRENT:
            wanted = "dropout=0, and a Dropout between recurrent networks of one layer each"
            raise _refused(f"{call.name} draws in its dropout", wanted)
        if func is F.multi_head_attention_forward:
            # Its tensors are (length, batch, width) whatever those of the module are.
            call.dim, call.folded = 0, True
            shape = tuple((args[0] if args else kwargs["query"]).shape)
            if len(shape) < 3 or shape[1] != len(call.keys):
                wanted = f"(length, {len(call.keys)}, width), with this rank's samples in dimension 1"
                raise _refused(f"{call.name} draws for a query of shape {shape}", wanted)
        attends = func in (F.multi_head_attention_forward, F.scaled_dot_product_attention)
        # The other backends of attention draw within a kernel.
        with _OperatorMode(call), sdpa_kernel(SDPBackend.MATH) if attends else nullcontext():
            return func(*args, **kwargs)


# `torch.compiler.disable` does the same, but imports the compiler at once.
_uncompiled = torch._disable_dynamo(SampleNumbers._run)
_current: SampleNumbers  # the mode of the last step, which a compiled operator cannot be given


class _Step:
    """A training step, and what it has drawn."""

    def __init__(self, seed: int, place: BatchPlace, has_samples: bool, device: Any) -> None:
        self._seed, self._place, self._device = seed, place, device
        self.has_samples = has_samples  # False: this rank's batch is padding
        self.in_backward = False
        self.calls: dict[int, tuple[str, int | None]] = {}  # name, and the dimension of the samples, by key

    @cached_property
    def keys(self) -> Tensor:
        """A number of each sample of this rank; made by the first draw."""
        place = self._place
        positions = torch.arange(place.samples, device=self._device) * place.stride + place.first
        of_epoch = _signed(mixed(self._seed, place.epoch))
        return _hashed(positions.mul_(_ODD[0]).add_(of_epoch))

    def call(self, name: str, dim: int | None) -> _Call:
        """Return the next call of a function that draws; one that is computed again in backward is the same."""
        if self.keys.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ConfigurationError(
                f"{name} in a CUDA graph with random_numbers='of_sample': expected a step that is not captured, because"
                " its numbers differ in each step."
            )
        # With a generator given, this draw passes the mode unseen in compiled code too.
        key = int(torch.empty((), dtype=torch.int64).random_(generator=torch.default_generator))
        if not self.in_backward:
            self.calls[key] = name, dim
        elif self.calls.get(key, ("", 0))[0] != name:
            raise ConfigurationError(
                f"{name} draws random numbers in backward that its forward has not drawn: expected, with"
                " random_numbers='of_sample', checkpoint(preserve_rng_state=True) outside torch.compile, and no"
                " draws in the backward of an autograd function."
            )
        return _Call(name, self.keys, key, self.calls[key][1])


def _check_seen(state: Tensor, gpu: Any, where: str) -> None:
    """Raise if torch's generators are not in these states."""
    moved = not torch.equal(torch.get_rng_state(), state)
    if moved or (gpu is not None and not torch.equal(gpu_state(), gpu)):
        raise ConfigurationError(
            f"{where} has drawn random numbers in a way that random_numbers='of_sample' does not see, such as in C++,"
            " in another thread or in a checkpoint within torch.compile: expected functions of torch, or a generator of"
            " your own, which is left as it is."
        )


def _refused(what: str, wanted: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} in a step with random_numbers='of_sample': expected {wanted}. If all samples share the numbers, call"
        " it within `shared()`."
    )


# -- Which functions draw --

_NAMES: dict[Any, str] = {
    F: "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout gumbel_softmax rrelu"
    " fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d"
    " fractional_max_pool3d_with_indices scaled_dot_product_attention multi_head_attention_forward",
    torch: "dropout dropout_ feature_dropout feature_dropout_ alpha_dropout alpha_dropout_ feature_alpha_dropout"
    " feature_alpha_dropout_ native_dropout rrelu rrelu_ rand randn randint rand_like randn_like randint_like"
    " randperm normal bernoulli multinomial poisson binomial _standard_gamma _sample_dirichlet lstm gru rnn_tanh"
    " rnn_relu",
    Tensor: "bernoulli bernoulli_ uniform_ normal_ exponential_ random_ geometric_ cauchy_ log_normal_ multinomial",
}
#: All functions that draw from torch's global generators, as a mode sees them.
DRAWING = {getattr(owner, name) for owner, names in _NAMES.items() for name in names.split()}
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
# Arguments that say how much is dropped, and whether they train: place, name and default.
_RATES: dict[Any, tuple[tuple[int, str, Any], ...]] = {
    F.dropout: ((1, "p", 0.5), (2, "training", True)),
    F.scaled_dot_product_attention: ((4, "dropout_p", 0.0),),
    F.multi_head_attention_forward: ((10, "dropout_p", 0.0), (13, "training", True)),
}


def _draws(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Return whether a call of a function in `DRAWING` draws."""
    if func in _RATES:
        rates = (args[i] if len(args) > i else kwargs.get(name, other) for i, name, other in _RATES[func])
        return all(one > 0 for one in rates)
    if func in _RECURRENT:  # the rate of dropout is the only float; behind it comes whether it trains
        return any(isinstance(one, float) and one > 0 and args[i + 1] for i, one in enumerate(args))
    return kwargs.get("generator") is None


class _OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Is on within one function that is known to draw: each operator that draws is by sample, or refused."""

    def __init__(self, call: _Call) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        kwargs.pop("generator", None)
        name, call = func.overloadpacket.__name__, self._call
        if name == "native_dropout":
            x, p, trains = args
            keep = 1 - p if trains else 1
            mask = call.mask(x, keep)
            return x * mask * (1 / keep if keep else 0.0), mask
        out, given = _output(name, args, kwargs)
        if out is not None and out.ndim == 0:
            with torch_seeded(call.next_key()):
                return func(*args, **kwargs)
        filling = None if out is None else call.filling(name.removesuffix("_like").rstrip("_"), out, given)
        if out is None or filling is None:
            wanted = "numbers that can be given by sample, as those of rand, randn, randint and bernoulli"
            raise _refused(f"{call.name} draws by the operator {name}", wanted)
        return out.copy_(filling)


def _output(name: str, args: Sequence[Any], kwargs: Any) -> tuple[Tensor | None, Sequence[Any]]:
    """Return the tensor that an operator fills, and the arguments that say with what."""
    if name.endswith("_"):
        return args[0], args[1:]
    if name.endswith("_like"):
        return torch.empty_like(args[0], **kwargs), args[1:]
    for index, one in enumerate(args):
        if isinstance(one, (list, tuple)):  # a size
            return torch.empty(one, **kwargs), args[:index]
    # Probabilities, or a mean and a deviation, one of which may be a number.
    given = (one for one in args if isinstance(one, Tensor))
    tensors = torch.broadcast_tensors(*given)  # type: ignore[no-untyped-call]
    return (torch.empty_like(tensors[0]), args) if tensors else (None, ())


# -- The numbers of a call: hashes, and what a tensor is filled with --


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z


# Odd factors: one for each dimension of a row, the first also for the positions of samples.
_ODD = [_signed(mixed(dim) | 1) for dim in range(16)]
_SIGNIFICAND_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _hashed(z: Tensor, rounds: int = 2) -> Tensor:
    """Hash each number of a tensor of int64 in place, as SplitMix64 does with two rounds."""
    for shift, factor in zip((30, 27)[:rounds], FACTORS, strict=False):
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


class _Call:
    """One call of a function that draws, and the numbers that it is given."""

    def __init__(self, name: str, keys: Tensor, key: int, dim: int | None) -> None:
        self.name, self.keys, self.key = name, keys, key  # `keys`: one of each sample of this rank
        self.dim = dim  # of the samples; None: they share the numbers
        self.folded = False  # whether dimension 0 may be samples times heads

    def next_key(self) -> int:
        self.key = mixed(self.key)
        return _signed(self.key)

    def bits(self, out: Tensor, kind: torch.dtype = torch.int32) -> Tensor:
        """Return random bits for each place of a tensor, as int32 or int64."""
        rows, dim = len(self.keys), self.dim or 0
        shape = list(out.shape)  # from which that of a row is made
        is_folded = self.folded and out.ndim == 3 and shape[0] % rows == 0
        if is_folded:
            shape[:1] = rows, shape[0] // rows
        if not -len(shape) <= dim < len(shape) or shape.pop(dim) != rows:
            raise _refused(
                f"{self.name} draws random numbers of shape {tuple(out.shape)}",
                f"{rows} in dimension {dim}, one for each sample of this rank's batch. If the samples are in another"
                " dimension, call it within `by_sample(dim=1)`",
            )
        key, keys = self.next_key(), self.keys.to(out.device)
        # The number of a place in the row does not depend on how long the dimensions are.
        places = torch.full((), key, device=out.device)
        for size, factor in zip(shape, _ODD, strict=False):
            places = places.unsqueeze(-1) + torch.arange(size, device=out.device) * factor
        # A row multiplies the hashes of the places by an odd number of its own, which is their second round, and adds
        # another. This takes a third of the time of a hash for each number, and 32 bits take half the time of 64.
        column = _hashed(places, rounds=1).to(kind)
        row = _hashed(torch.stack([keys ^ key, keys + (key ^ _signed(FACTORS[0]))])).to(kind)
        row = row.view(2, rows, *[1] * len(shape))
        found: Tensor = (column * row[0].bitwise_or_(1)).add_(row[1])
        return found.flatten(0, 1) if is_folded else found.movedim(0, dim)

    def mask(self, out: Tensor, keep: float) -> Tensor:
        """Return what is true with the probability ``keep``."""
        bits = self.bits(out)
        return bits >= -(1 << 31) if keep >= 1 else bits < int(keep * 2.0**32) - (1 << 31)

    def uniform(self, out: Tensor, dtype: torch.dtype, *, inside: bool = False) -> Tensor:
        """Return numbers from 0 up to, and without, 1; ``inside`` also leaves out 0."""
        kind = torch.int64 if dtype is torch.float64 else torch.int32
        digits = _SIGNIFICAND_BITS[dtype] - inside
        bits = self.bits(out, kind) >> (8 * kind.itemsize - digits)
        found = bits.bitwise_and_((1 << digits) - 1).to(dtype)
        return (found.add_(0.5) if inside else found).mul_(2.0**-digits)

    def logarithms(self, out: Tensor) -> Tensor:
        """Return logarithms of numbers between 0 and 1, all finite and none 0."""
        dtype = torch.float64 if out.dtype is torch.float64 else torch.float32
        return self.uniform(out, dtype, inside=True).log_()

    def filling(self, kind: str, out: Tensor, given: Sequence[Any]) -> Any:
        """Return what an operator fills a tensor with; ``None`` if it has no numbers by sample."""
        first, second = (*given, *(0.0, 1.0)[len(given) :])[:2]  # by default 0 and 1
        if kind in ("uniform", "rand"):
            return self.uniform(out, out.dtype).mul_(second - first).add_(first)
        if kind in ("normal", "randn"):
            # Box and Muller's way: https://doi.org/10.1214/aoms/1177706645
            radius = self.logarithms(out).mul_(-2).sqrt_()
            angle = self.uniform(out, radius.dtype).mul_(2 * pi)
            return radius.mul_(angle.cos_()) * second + first
        if kind == "bernoulli":
            p = given[-1] if given else 0.5  # bernoulli(input, p) has another one in front
            return self.uniform(out, torch.float64) < p if isinstance(p, Tensor) else self.mask(out, p)
        if kind == "exponential":
            return self.logarithms(out).div_(-given[0] if given else -1.0)
        if kind in ("random", "randint"):
            low, high = (0, *given)[-2:] if given else (0, (1 << 63) - 1)
            # The lowest bits of different rows resemble each other, so that all are hashed once more.
            bits = _hashed(self.bits(out, torch.int64)).bitwise_and_((1 << 63) - 1)
            return bits.remainder_(high - low).add_(low)
        return None


# -- Dropout, in compiled code by an operator --


def _dropout(noise: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    found = noise(input.detach(), p, _dims[-1])
    return input.mul_(found) if inplace else input * found


def _noise(x: Tensor, p: float, dim: int | None) -> Tensor:
    """Return what dropout multiplies its input by."""
    call = _current._step.call("dropout", dim)
    if call.dim is None:
        generator = torch.Generator(x.device).manual_seed(call.key)
        mask = torch.empty_like(x).bernoulli_(1 - p, generator=generator)
    else:
        mask = call.mask(x, 1 - p)
    return mask.to(x.dtype, memory_format=torch.contiguous_format).mul_(1 / (1 - p) if p < 1 else 1.0)


# The tags keep a compiler from leaving it out, from running it twice, and from putting it into a CUDA graph.
_TAGS = torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe
_noise_operator = torch.library.custom_op("lockstep::dropout_noise", _noise, mutates_args=(), tags=_TAGS)
_noise_operator.register_fake(lambda x, p, dim: torch.empty_like(x, memory_format=torch.contiguous_format))
