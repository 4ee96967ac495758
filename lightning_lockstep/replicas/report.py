"""Where ranks differ, which of them are in the minority, and the likely reasons in the order of the evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_lockstep._text import counted, listed, plain_table, ranks_in_words
from lightning_lockstep.replicas.contents import SECTIONS

# How many tensors of each kind a report names, and how many settings.
_NAMED = 5
_SETTINGS_NAMED = 12

Parts = list[list[int]]  # ranks that have the same, the largest group first
Answers = Mapping[int, Mapping[str, Any]]  # what a rank, or one that agrees with it, has sent; see `Check`


class Finding(NamedTuple):
    """A difference between ranks; all of them make the same one."""

    names: set[str]  # of the tensors and settings that differ
    text: str  # what is printed, and what the error says


# -- What differs, who is in the minority, why: decided by every rank, from the same answers --


def judge(
    count: int,
    good: int | None,
    answers: Answers,
    places: Sequence[str],  # host and device of each rank
    statistics: set[str],
    held: Sequence[int] = (),  # the ranks that are compared, if they are not all
) -> Finding | None:
    """Return what differs between ranks; add to ``statistics`` the buffers in which each rank has its own values."""
    # They are remembered, because they may not change between two checks, such as those of a validation.
    tensors: dict[str, dict[str, Parts]] = {}
    for section in SECTIONS:
        found = _differing({rank: answer["sums"][section] for rank, answer in answers.items()})
        if section == "buffers":
            # Those that each rank has found in its own batches, as far as can be seen.
            told = [{*answer["statistics"]} & {*answer["changed"]} for answer in answers.values()]
            statistics |= found.keys() & set.intersection(*told)
            found = {name: parts for name, parts in found.items() if name not in statistics}
            if any(answer["padding"] for answer in answers.values()):
                found = {}  # what padding changes is put back on its rank alone, until the next forward pass
        if found:
            tensors[section] = found
    settings = {rank: answer["settings"] for rank, answer in answers.items()}
    differing = {
        name: {rank: of_rank.get(name, "-") for rank, of_rank in settings.items()} for name in _differing(settings)
    }
    if not tensors and not differing:
        return None
    suspects = _suspects(tensors, differing, answers)
    reasons = [_BEFORE]
    if count:
        named = [f"rank {rank} (host {places[rank]})" for rank in suspects or sorted(answers)]
        reasons = _reasons(tensors, differing, answers) or [
            _reason_apart_from_steps(tensors, answers),
            f"Memory or arithmetic of a device that fails: {listed(named, 4)}.",
        ]
    names = {*differing, *(name for of_kind in tensors.values() for name in of_kind)}
    kinds = " and ".join([*tensors, *(["settings"] if differing else [])])
    who = f"{ranks_in_words(held)}, which hold the same part of the model," if held else "the ranks"
    when = f"after batch {count} of this fit" if count else "before the first batch"
    head = [f"{who} differ in their {kinds}, found {when}", "", *_table(tensors)]
    return Finding(names, "\n".join(head + _conclusion(good, suspects, reasons)))


def _conclusion(good: int | None, suspects: Sequence[int], reasons: Sequence[str]) -> list[str]:
    """Return the lines that say since when, which ranks, and why."""
    equal = {None: "never found equal", 0: "last found equal at the start"}
    minority = "No majority agrees, so it is not known which rank is wrong."
    if suspects:
        minority = f"In the minority: {ranks_in_words(suspects)}."
    return [
        f"They were {equal.get(good, f'last found equal after batch {good}')}. {minority}",
        "Likely reasons:" if len(reasons) > 1 else "Likely reason:",
        *(f"  {number}. {reason}" for number, reason in enumerate(reasons, 1)),
    ]


def _table(tensors: Mapping[str, Mapping[str, Parts]]) -> list[str]:
    """Return the lines that name the first tensors of each kind, with the ranks that agree."""
    shown = (one for names in tensors.values() for one in list(names.items())[:_NAMED])
    rows = [(name, _in_words(parts)) for name, parts in shown]
    more = [
        f"{counted(len(names) - _NAMED, 'more tensor')} of {kind}"
        for kind, names in tensors.items()
        if len(names) > _NAMED
    ]
    table = [plain_table(("differs", "ranks that agree"), rows)] if rows else []
    return [*table, *([f"  and {', '.join(more)}"] if more else []), *([""] if rows else [])]


def _in_words(parts: Parts) -> str:
    most = _minority(parts)
    texts = [ranks_in_words(part) + (" <- differs" if part[0] in most else "") for part in parts]
    return listed(texts, 4) if len(parts) < 5 else f"none of {counted(len(parts), 'group')}"


def _differing(values: Mapping[int, Mapping[str, Any]]) -> dict[str, Parts]:
    """Return by name the ranks that have the same value, if not all have it."""
    names = dict.fromkeys(name for of_rank in values.values() for name in of_rank)
    parts = {name: parts_of({rank: of_rank.get(name) for rank, of_rank in values.items()}) for name in names}
    return {name: found for name, found in parts.items() if len(found) > 1}


def parts_of(values: Mapping[int, Any]) -> Parts:
    """Return the ranks that have the same value, the largest group first."""
    found: dict[Any, list[int]] = {}
    for rank in sorted(values):
        found.setdefault(values[rank], []).append(rank)
    return sorted(found.values(), key=lambda ranks: (-len(ranks), ranks))


def _minority(parts: Parts) -> list[int]:
    if len(parts) > 1 and len(parts[0]) > len(parts[1]):
        return sorted(rank for part in parts[1:] for rank in part)
    return []


def _suspects(
    tensors: Mapping[str, Mapping[str, Parts]], settings: Mapping[str, Mapping[int, str]], answers: Answers
) -> list[int]:
    """Return the ranks in the minority: of the settings, of the optimizer steps, else of most tensors."""
    steps = _steps(answers)
    for parts in (*map(parts_of, settings.values()), parts_of(steps)):
        if found := _minority(parts):
            return found
    counts = Counter(tuple(_minority(parts)) for names in tensors.values() for parts in names.values())
    del counts[()]
    if counts:
        return list(counts.most_common(1)[0][0])
    # Of two ranks, suspect the one that left out a step, or that alone changed something that should stay.
    fewest = min(map(sum, steps.values()))
    fewer = [rank for rank, of_rank in steps.items() if sum(of_rank) == fewest]
    if len(fewer) < len(steps):
        return fewer
    return next((changed for _, changed in _changed_alone(tensors, answers)), [])


def _steps(answers: Answers) -> dict[int, tuple[int, ...]]:
    return {rank: tuple(answer["steps"]) for rank, answer in sorted(answers.items())}


def _changed_alone(tensors: Mapping[str, Mapping[str, Parts]], answers: Answers) -> Iterator[tuple[str, list[int]]]:
    """Yield what has changed since the last check on some ranks only, with those."""
    for name in (name for names in tensors.values() for name in names):
        changed = [rank for rank in sorted(answers) if name in answers[rank]["changed"]]
        if 0 < len(changed) < len(answers):
            yield name, changed


def _reasons(
    tensors: Mapping[str, Mapping[str, Parts]], settings: Mapping[str, Mapping[int, str]], answers: Answers
) -> list[str]:
    shown = list(settings.items())[:_SETTINGS_NAMED]
    reasons = [f"{name} is {_who_has_what(values)}." for name, values in shown]
    steps = _steps(answers)
    if len({*steps.values()}) > 1:
        told = {rank: str([*of_rank]) for rank, of_rank in steps.items()}
        reasons.append(
            f"An optimizer has stepped on some ranks only: steps of each optimizer are {_who_has_what(told)}. Let all"
            " ranks step the same number of times, even a rank that has no loss for its batch."
        )
    gradients = {rank: answer["gradients"] for rank, answer in answers.items() if answer["gradients"]}
    if differing := _differing(gradients):
        reasons.append(_reason_for_gradients(list(differing), len(next(iter(gradients.values()))), answers))
    if tensors.keys() == {"buffers"}:
        reasons.append(
            "Only buffers differ: each rank writes its own values into them, and nothing makes them equal. Reduce what"
            " is written, or leave buffers out with buffers='none'."
        )
    return reasons


def _reason_apart_from_steps(tensors: Mapping[str, Mapping[str, Parts]], answers: Answers) -> str:
    """Return the likely reason if settings and steps are equal, and gradients as far as they were seen."""
    unchanged = [name for name, _ in _changed_alone(tensors, answers)]
    if unchanged:
        return (
            f"{listed(unchanged, 3)} changed on some ranks only, while settings and optimizer steps are equal: a hook"
            " or a callback wrote it on those ranks, or they alone loaded a checkpoint."
        )
    told = [*answers.values()]
    if told[0]["automatic"] or any(answer["gradients"] or not answer["sees_gradients"] for answer in told):
        return (
            "Settings and optimizer steps are equal, and so are the gradients that were looked at: a hook or a callback"
            " wrote other weights on some ranks only, or they alone loaded a checkpoint, or gradients of an earlier"
            " step were not reduced."
        )
    return (
        "No gradients were seen before the optimizers stepped: in manual optimization call self.manual_backward(loss),"
        " and step with the optimizers that self.optimizers() returns."
    )


def _reason_for_gradients(names: Sequence[str], compared: int, answers: Answers) -> str:
    told = list(answers.values())
    if told[0]["divided"]:
        return f"The gradients of {listed(names, 3)} differed in the last step: {_CHANGED}."
    if len(names) < compared:
        outside = [name for name in names if name in told[0]["outside"]]
        why = _UNKNOWN.format(listed(outside, 3)) if outside else f"{_CHANGED}, {_OR_UNKNOWN}"
        return f"The gradients of {listed(names, 3)} differed in the last step, those of the others did not: {why}"
    why = _PAST_DDP
    if not all(answer["wrapped"] for answer in told):
        why = _NOT_WRAPPED
    elif not all(answer["synchronizes"] for answer in told):
        why = _NOT_SYNCHRONIZED
    elif not all(answer["automatic"] for answer in told):
        why = _MANUAL
    return f"The gradients of all ranks differed in the last step, so they were not reduced: {why}"


_BEFORE = (
    "Something wrote on some ranks only after the strategy had made them equal, such as a hook (on_fit_start,"
    " on_train_start), a callback, or a checkpoint that was loaded there; or the strategy makes nothing equal and the"
    " ranks began with other seeds."
)
# Why gradients differ: of some parameters, or of all.
_UNKNOWN = (
    "DDP does not know {}: DDP was told to ignore it, or it was frozen or missing when the model was wrapped. Unfreeze"
    " and add parameters before the fit begins (configure_model)."
)
_CHANGED = "they are changed on some ranks after the reduction, for example by a hook"
_OR_UNKNOWN = "or DDP does not know them, because configure_optimizers added them to the model, for example."
_NOT_WRAPPED = "no DistributedDataParallel wraps the model, and the strategy has not reduced them."
_NOT_SYNCHRONIZED = "DDP is told not to synchronize: no_sync() was never left, or require_backward_grad_sync is False."
_MANUAL = "in manual optimization loss.backward() and torch.autograd.grad go past DDP. Call self.manual_backward(loss)."
_PAST_DDP = (
    "the loss came from a forward past DDP (of the module that it wraps), its gradients from torch.autograd.grad, or a"
    " hook changed them after the reduction."
)


def _who_has_what(values: Mapping[int, str]) -> str:
    return ", ".join(f"{values[ranks[0]]} on {ranks_in_words(ranks)}" for ranks in parts_of(values))


# -- At the start, before the first step: a table of who has what --


def start_table(facts: Mapping[int, Mapping[str, str]]) -> tuple[str, bool]:
    """Return a table of what differs at the start, and whether some of it is a fault; facts by rank."""
    differing = _differing(facts)
    rows: list[tuple[str, str, str]] = []
    shown = list(differing.items())[:_SETTINGS_NAMED]
    for what, parts in shown:
        most = _minority(parts)
        for part in parts:
            value = facts[part[0]].get(what, "nothing")
            mark = "   <- differs" if part[0] in most else ""
            rows.append((what, ranks_in_words(part), f"{value}{mark}"))
    text = plain_table(("what", "ranks", "have"), rows)
    if len(differing) > len(shown):
        text += f"\n  and {len(differing) - len(shown)} more"
    # Ranks with other versions may train rightly: that is reported, and the run goes on.
    return text, not all(what.startswith("version of ") for what in differing)
