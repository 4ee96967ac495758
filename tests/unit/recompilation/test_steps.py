"""Which compilations are expected, and what is said of the others."""

from __future__ import annotations

from lightning_lockstep.shapes.recompilation import Compilation, StepCompilations, advice_on_shapes

ONE = Compilation("train.py:12 in forward", 1.5, "tensor 'x' size mismatch at index 0. expected 8, actual 5")
LARGE, SMALL = ((8, 4), (8,)), ((5, 4), (5,))


def test_the_first_batches_of_each_stage_are_expected() -> None:
    found = StepCompilations(expected=2)
    for stage in ("training", "validation"):
        done = [found.batch_done(stage, number, number, LARGE, [ONE]) for number in range(3)]
        assert [one is not None and one.is_expected for one in done] == [True, True, False]
    assert found.batch_done("training", 3, 3, LARGE, []) is None
    assert len(found.steps) == 6
    line = found.steps[0].line()
    assert line == "training batch 0 (step 0) compiled 1 graph in 1.5 s, as the first batches do"


def test_batches_that_only_accumulate_are_expected_too() -> None:
    found = StepCompilations(expected=2)
    done = [
        found.batch_done("training", number, number // 3, LARGE, [ONE], accumulated=3) for number in range(7)
    ]
    assert [one is not None and one.is_expected for one in done] == [True] * 6 + [False]


def test_new_shapes_are_shown_beside_those_before() -> None:
    found = StepCompilations(expected=1)
    found.batch_done("training", 0, 0, LARGE, [ONE])
    late = found.batch_done("training", 1, 1, SMALL, [ONE, ONE])
    assert late is not None and late.line() == (
        "training batch 1 (step 1) compiled 2 graphs in 3.0 s: its shapes (5, 4), (5,) are new, the batch before had"
        " (8, 4), (8,). StaticShapes(last_batch='drop') leaves such a batch out, last_batch='pad' fills it up"
    )


def test_advice_names_the_option_that_would_have_saved_it() -> None:
    def advice(stage: str, now: tuple[int, ...], before: tuple[int, ...]) -> str:
        return advice_on_shapes(stage, (now, (3,)), (before, (3,)))

    assert (
        advice("validation", (5, 4), (8, 4))
        == ". StaticShapes(evaluation_last_batch='pad') fills such a batch up"
    )
    assert advice("training", (9, 4), (8, 4)) == ". The same number of samples in every batch saves that"
    assert "sequence_lengths" in advice("training", (8, 5), (8, 4))
    assert advice("training", (5, 5), (8, 4)).count("StaticShapes") == 2
    assert "A number of samples that the batch size divides" in advice("predict", (5, 4), (8, 4))
    assert advice_on_shapes("training", ((8,),), ((8, 2),)) == advice_on_shapes("training", ((8,),), ()) == ""


def test_known_shapes_are_no_reason_and_the_compilers_own_is_given() -> None:
    found = StepCompilations(expected=0)
    found.batch_done("training", 0, 0, LARGE, [])
    late = found.batch_done("training", 1, 1, LARGE, [ONE])
    assert late is not None and late.line().endswith(
        "with shapes that were seen before; train.py:12 in forward: tensor 'x' size mismatch at index 0. expected 8,"
        " actual 5"
    )
    silent = found.batch_done("training", 2, 2, LARGE, [Compilation("torch-xla", 0.1)])
    assert silent is not None and silent.line().endswith("the compiler does not say why")
