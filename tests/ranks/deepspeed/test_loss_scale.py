"""Skipped steps: what engines say of them, and which of them are ordinary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from lightning_lockstep._doors.deepspeed_engines import StepOutcome, adapter_of
from lightning_lockstep.deepspeed.precision import LossScaleHistory
from tests.helpers import run_ranks

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


def has_float16() -> bool:
    """Whether this CPU computes in float16, as DeepSpeed asks for."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):  # not built for such CPUs
        return False


needs_float16 = pytest.mark.skipif(not has_float16(), reason="this CPU does not compute in float16")

FEATURES = 8


def start_deepspeed() -> Any:
    from lightning_lockstep.deepspeed.importing import import_deepspeed

    deepspeed = import_deepspeed("cpu")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does it, and nothing is compiled
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


# -- with the scalers that DeepSpeed's optimizers have -------------------------------------------------


CALM = [True] * 3 + [False] * 200
# Each window doubles the scale, which is one too much: a skip that uses up the hysteresis, and one that halves it.
CYCLE = [False] * 101 + [True, True]
ROWS: dict[str, tuple[list[bool], dict[str, Any]]] = {
    "start": ([True] * 8 + [False] * 500, {}),
    "windows": ([True] * 3 + CYCLE * 20, {"scale_window": 100}),
    "nan": ([True] * 30, {}),
    "seven": (CALM + [True] * 7, {}),
    "eight": (CALM + [True] * 8, {}),
    "often": ([False] * 50 + ([True] + [False] * 20) * 12, {"consecutive_hysteresis": True}),
    "static": ([False] * 20 + [True] * 8, {"static": 2.0**15}),
}


def feed_scalers() -> dict[str, dict[str, Any]]:
    start_deepspeed()
    return {name: feed_scaler(*row) for name, row in ROWS.items()}


def feed_scaler(overflows: list[bool], options: dict[str, Any]) -> dict[str, Any]:
    """Give DeepSpeed's own scaler a row of overflows, and the history what it says after each."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    given = {"init_scale": 2**16, "scale_window": 1000, "min_scale": 1, "delayed_shift": 2}
    dynamic = {**given, "consecutive_hysteresis": False, **options}
    static = dynamic.pop("static", None)
    scaler = CreateLossScaler(torch.half, static, static is None, dynamic)
    history = LossScaleHistory()
    verdicts: list[str | None] = []
    end = ""
    for overflow in overflows:
        try:
            scaler.update_scale(overflow)
        except Exception as error:  # how DeepSpeed ends a run at the floor
            end = str(error)
            break
        history.record(adapter_of(engine_of(scaler, overflow)).outcome())  # type: ignore[arg-type]
        verdicts.append(history.verdict())
    return {
        "verdicts": verdicts,
        "first": next((n for n, text in enumerate(verdicts, 1) if text), None),
        "last": verdicts[-1],
        "counts": (history.steps, history.skips, history.skips_in_a_row),
        "scales": list(history.scales),
        "end": end,
    }


class Bare:
    """Holds attributes, as an engine and its optimizer do."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def engine_of(scaler: Any, overflow: bool) -> Bare:
    return Bare(optimizer=Bare(loss_scaler=scaler, overflow=overflow, dtype=torch.float16))


@pytest.fixture(scope="module")
def fed() -> dict[str, dict[str, Any]]:
    [answers] = run_ranks(1, feed_scalers)
    return answers  # type: ignore[no-any-return]


@needs_deepspeed
def test_a_scale_that_comes_down_at_the_start_is_ordinary(fed: dict[str, dict[str, Any]]) -> None:
    # 2^16 down to 2^9, and then it fits.
    answer = fed["start"]
    assert answer["scales"][:9] == [2.0**16, *(2.0**power for power in range(15, 8, -1)), 2.0**9]
    assert answer["first"] is None
    assert answer["counts"] == (508, 8, 0)


@needs_deepspeed
def test_a_step_now_and_then_at_the_end_of_a_window_is_ordinary(fed: dict[str, dict[str, Any]]) -> None:
    answer = fed["windows"]
    assert max(answer["scales"]) > min(answer["scales"])
    assert answer["counts"][1] == 43
    assert answer["first"] is None


@needs_deepspeed
def test_nan_from_the_first_step_is_told_long_before_the_floor(fed: dict[str, dict[str, Any]]) -> None:
    answer = fed["nan"]
    assert answer["scales"][answer["first"] - 1] == 2.0**8
    assert answer["verdicts"][answer["first"] - 1].startswith("8 steps in a row or more were skipped")
    assert "nan or infinite at any scale" in answer["verdicts"][answer["first"] - 1]
    # Then it is at the floor, where DeepSpeed ends the run with the next one.
    assert answer["scales"][-1] == 1.0
    assert "its floor, min_loss_scale=1" in answer["last"]
    assert "The next overflow ends the run." in answer["last"]
    assert "Loss scale: " in answer["last"] and answer["last"].endswith("4, 2, 1.")
    assert answer["end"].startswith("Current loss scale already at minimum")
    assert answer["counts"][0] < 30


@needs_deepspeed
def test_many_in_a_row_later_on(fed: dict[str, dict[str, Any]]) -> None:
    assert fed["seven"]["first"] is None
    assert fed["eight"]["first"] == len(CALM) + 8


@needs_deepspeed
def test_too_often_within_a_window(fed: dict[str, dict[str, Any]]) -> None:
    answer = fed["often"]
    assert answer["scales"][-1] == 2.0**16  # the hysteresis hides each of them from the scale
    assert answer["verdicts"][answer["first"] - 1].startswith("8 of the last 148 steps were skipped")
    assert "a loss scale that fits skips 2 in 1000 (loss_scale_window)" in answer["last"]


@needs_deepspeed
def test_a_skip_that_was_asked_for_says_nothing() -> None:
    history = LossScaleHistory()
    for _ in range(20):
        history.expect_skip()
        history.record(StepOutcome(True))
    assert history.verdict() is None and (history.steps, history.skips) == (20, 0)
    history.record(StepOutcome(True))
    assert "no loss scale is in use" in str(history.verdict())


def test_a_fixed_scale_that_is_too_high(fed: dict[str, dict[str, Any]]) -> None:
    answer = fed["static"]
    assert answer["first"] == 28
    assert "the loss scale is fixed at 32768" in answer["last"]


# -- with real engines ---------------------------------------------------------------------------------


class Explodes(torch.nn.Module):
    """Its loss is multiplied by what the test says, batch by batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(FEATURES, 1, bias=False)

    def forward(self, inputs: torch.Tensor, factor: float) -> torch.Tensor:
        return self.layer(inputs).float().sum() * factor


# Scaled by 2^16 it overflows float16, by 2^13 not: three halvings, and the hysteresis of ZeRO.
TOO_MUCH = 4.0
NAN = float("nan")
ENGINES: dict[str, tuple[int, str, list[float], dict[str, Any]]] = {
    **{f"fp16 {stage}": (stage, "fp16", [TOO_MUCH] * 12, {"loss_scale_window": 50}) for stage in (1, 2, 3)},
    "fp16 0": (0, "fp16", [1.0, NAN, NAN, 1.0], {"loss_scale_window": 50}),
    "fp16 nan": (2, "fp16", [1e-3] * 12 + [NAN] * 8, {}),
    **{
        f"bf16 {stage}": (stage, "bf16", [1.0, float("inf"), 1.0, NAN], {"check_grad_overflow": True})
        for stage in (0, 1, 2, 3)
    },
    "fp32 0": (0, "fp32", [1.0, 1.0], {}),
    "torch_autocast 0": (0, "torch_autocast", [TOO_MUCH] * 8, {"dtype": "float16"}),
}


def train_all() -> dict[str, dict[str, Any]]:
    deepspeed = start_deepspeed()
    return {
        name: train(deepspeed, *run)
        for name, run in ENGINES.items()
        if run[1] not in ("fp16", "torch_autocast") or has_float16()
    }


def train(
    deepspeed: Any, stage: int, precision: str, factors: list[float], options: dict[str, Any]
) -> dict[str, Any]:
    """Train a real engine on batches whose losses have these factors; returns what is read after each step."""
    torch.manual_seed(0)
    model = Explodes()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True, **options}
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    outcomes, changed = [], []
    for factor in factors:
        before = weights_of(engine, stage)
        engine.backward(engine(torch.ones(1, FEATURES, dtype=dtype), factor))
        engine.step()
        outcomes.append(adapter_of(engine).outcome())
        changed.append(not torch.equal(before, weights_of(engine, stage)))
    history = LossScaleHistory()
    for outcome in outcomes:
        if outcome is not None:
            history.record(outcome)
    return {
        "outcomes": outcomes,
        "changed": changed,
        "skipped_steps": engine.skipped_steps,
        "verdict": history.verdict(),
        "counts": (history.steps, history.skips, history.skips_in_a_row),
    }


def weights_of(engine: Any, stage: int) -> torch.Tensor:
    """The float32 weights of this rank, which a skipped step does not change."""
    zero = engine.optimizer
    groups = {
        1: "single_partition_of_fp32_groups",
        2: "single_partition_of_fp32_groups",
        3: "fp32_partitioned_groups_flat",
    }
    if stage == 0 and hasattr(zero, "fp32_groups"):
        tensors = [tensor for group in zero.fp32_groups for tensor in group]
    else:
        tensors = getattr(zero, groups.get(stage, "fp32_groups_flat"), None) or list(
            engine.module.parameters()
        )
    return torch.cat([tensor.detach().clone().flatten() for tensor in tensors])


@pytest.fixture(scope="module")
def engines() -> dict[str, dict[str, Any]]:
    first, second = run_ranks(2, train_all, timeout=240)
    assert first.keys() == second.keys()
    assert all(first[name]["outcomes"] == second[name]["outcomes"] for name in first)
    return first  # type: ignore[no-any-return]


@needs_deepspeed
@needs_float16
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_real_engine_in_float16(engines: dict[str, dict[str, Any]], stage: int) -> None:
    answer = engines[f"fp16 {stage}"]
    outcomes = answer["outcomes"]
    skips = [outcome.skipped for outcome in outcomes]
    scales = [outcome.scale for outcome in outcomes]
    # The scale came down until it fitted, and then the weights changed in every step.
    assert sum(skips) == answer["skipped_steps"] > 1
    assert skips == sorted(skips, reverse=True) and not skips[-1]
    assert scales[0] >= scales[-1] and scales[-1] * TOO_MUCH <= torch.finfo(torch.float16).max
    assert scales[-1] * TOO_MUCH * 2 > torch.finfo(torch.float16).max / 2
    assert answer["changed"] == [not skipped for skipped in skips]
    last = outcomes[-1]
    assert (last.is_dynamic, last.floor, last.window) == (True, 1.0, 50)
    assert (last.hysteresis, last.ends_at_floor) == (2, True)
    assert answer["verdict"] is None


@needs_deepspeed
@needs_float16
def test_a_real_engine_in_float16_without_zero(engines: dict[str, dict[str, Any]]) -> None:
    """At stage 0 the engine of 0.19 forgets to scale the loss (DeepSpeed #8393); the scale itself does its work."""
    answer = engines["fp16 0"]
    of_all: dict[str, Any] = {"is_dynamic": True, "floor": 1.0, "window": 50}
    assert answer["outcomes"] == [
        StepOutcome(skipped, 2.0**power, **of_all)
        for skipped, power in ((False, 16), (True, 15), (True, 14), (False, 14))
    ]
    assert answer["changed"] == [True, False, False, True]


@needs_deepspeed
@needs_float16
def test_a_real_engine_whose_loss_is_nan(engines: dict[str, dict[str, Any]]) -> None:
    answer = engines["fp16 nan"]
    assert [outcome.skipped for outcome in answer["outcomes"]] == [False] * 12 + [True] * 8
    assert not any(answer["changed"][12:])
    assert "8 of 20 steps were skipped, the last 8 in a row" in answer["verdict"]


@needs_deepspeed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_real_engine_in_bfloat16(engines: dict[str, dict[str, Any]], stage: int) -> None:
    answer = engines[f"bf16 {stage}"]
    assert answer["outcomes"] == [StepOutcome(skipped) for skipped in (False, True, False, True)]
    assert answer["changed"] == [True, False, True, False]
    assert answer["skipped_steps"] == 2
    assert answer["verdict"].startswith("A step was skipped though no loss scale is in use")


@needs_deepspeed
def test_a_real_engine_in_float32_has_nothing_to_say(engines: dict[str, dict[str, Any]]) -> None:
    assert engines["fp32 0"]["outcomes"] == [None, None]


@needs_deepspeed
@needs_float16
def test_a_real_engine_with_the_scaler_of_torch(engines: dict[str, dict[str, Any]]) -> None:
    answer = engines["torch_autocast 0"]
    assert [outcome.scale for outcome in answer["outcomes"]] == [
        2.0**power for power in (15, 14, 13, *[13] * 5)
    ]
    assert answer["changed"] == [False] * 3 + [True] * 5
    assert answer["counts"] == (
        8,
        2,
        0,
    )  # told by the scale alone, which for the first step is not known before
    assert answer["skipped_steps"] == 0  # the engine does not know
    assert answer["verdict"] is None


# -- the history alone ---------------------------------------------------------------------------------


def told(outcomes: Iterable[StepOutcome]) -> list[str | None]:
    history = LossScaleHistory()
    news = []
    for outcome in outcomes:
        history.record(outcome)
        news.append(history.news())
    return news


def of_scaler(scales: Iterable[float]) -> list[StepOutcome]:
    """What torch's scaler says: no more than its scale."""
    return [StepOutcome(None, scale, is_dynamic=True, window=2000) for scale in scales]


def test_torchs_scaler_tells_a_skip_by_its_scale() -> None:
    history = LossScaleHistory()
    for outcome in of_scaler([65536.0, 32768.0, 32768.0, 16384.0]):
        history.record(outcome)
    assert (history.steps, history.skips, history.skips_in_a_row) == (4, 2, 1)
    assert history.history().endswith("Loss scale: 65536, 32768 (2 steps), 16384.")
    assert history.verdict() is None


def test_a_real_scaler_of_torch() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    history = LossScaleHistory()
    engine = Bare(optimizer=optimizer, torch_autocast_z0_gradscaler=scaler)
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        history.record(adapter_of(engine).outcome())  # type: ignore[arg-type]
    assert (history.steps, history.skips, list(history.scales)) == (3, 1, [1024.0, 512.0, 512.0])


def test_a_scale_that_nothing_lowers() -> None:
    """As with torch_autocast in float16 under ZeRO of 0.19, which skips before torch's scaler hears of it."""
    history = LossScaleHistory()
    for _ in range(7):
        history.record(StepOutcome(True, 65536.0, is_dynamic=True, window=2000))
    assert history.verdict() is None
    history.record(StepOutcome(True, 65536.0, is_dynamic=True, window=2000))
    assert "the loss scale stays at 65536: nothing lowers it" in str(history.verdict())


def test_news_are_told_once_for_each_kind() -> None:
    outcomes = [StepOutcome(True)] * 3 + [StepOutcome(False)] + [StepOutcome(True)]
    texts = told(outcomes)
    assert [text is not None for text in texts] == [True, False, False, False, True]


def test_the_history_is_bounded() -> None:
    history = LossScaleHistory(keep=10)
    for step in range(100):
        history.record(StepOutcome(step % 2 == 0, float(step), is_dynamic=True, window=1000))
    assert list(history.scales) == [float(step) for step in range(90, 100)]
    assert history.history().count(",") < 20


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        (lambda: of_scaler([2.0**16] * 5), False),
        (lambda: [StepOutcome(True, 2.0**14, True, floor=1.0, window=4)] * 3, False),
        (lambda: [StepOutcome(False, 1.0, True, floor=1.0, window=1000)] * 3, False),
        (lambda: [StepOutcome(True, 1.0, True, floor=1.0, window=1000)], True),
    ],
    ids=["no-skip", "start", "starts-at-its-floor", "floor"],
)
def test_what_is_ordinary(change: Callable[[], list[StepOutcome]], is_told: bool) -> None:
    assert any(told(change())) is is_told
