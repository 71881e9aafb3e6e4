"""Which proposals are requested of the job, and why the others are not. Pure: a value that is replaced, never changed.

When several controllers make proposals in one epoch, these are decided on in the order in which the controllers were
attached. The rules:

1. One operation at a time. While one is in progress, whoever requested it, nothing else is requested.
2. A subject that a controller has changed rests for some epochs, so that the effect can be seen. For some more epochs
   it belongs to that controller: another one's proposal for the same subject is refused.
3. A controller that makes two proposals for one subject at once, or more than a few proposals at once, gets none of
   them.
4. A controller reverses its own changes a few times within some epochs at most. More would contradict itself over time;
   it is not stopped, because the load may be what turns.
5. A proposal that has failed is tried again ever more rarely, because each attempt is in the job's history for good and
   may have cost an epoch. That ends when it succeeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from midstream.controllers.controller import Proposal
from midstream.controllers.situation import Situation
from midstream.controllers.subjects import Subject, is_operation, subjects_of, words_of

__all__ = ["HOLD", "LONGEST_REST", "MOST_AT_ONCE", "MOST_TURNS", "REST", "TURNS_WITHIN", "Arbiter", "fault_of"]

REST = 3
"""Epochs after an operation in which its subjects are left alone."""
LONGEST_REST = 1000
"""Epochs at most after operations that have failed, one after the other; after the first one there are as many as
:data:`REST` says, then twice as many each time."""
HOLD = 12
"""Epochs after an operation in which its subjects belong to the controller that has requested it."""
MOST_AT_ONCE = 8
"""Most proposals of one controller for one epoch; more are a flood."""
MOST_TURNS, TURNS_WITHIN = 6, 100
"""A controller reverses a subject at most this many times within this many epochs."""


@dataclass(frozen=True)
class _Claim:
    """A controller has changed a subject."""

    controller: str
    operation: str
    direction: int
    epoch: int
    """When the operation ended; until then, when it was requested."""


@dataclass(frozen=True)
class _Failures:
    """The newest operations of a controller on a subject have failed."""

    count: int
    epoch: int
    """The epoch of the last failure."""

    @property
    def rest(self) -> int:
        """Number of epochs in which nothing is tried again."""
        return min(LONGEST_REST, REST << min(self.count - 1, 20))


@dataclass(frozen=True)
class Arbiter:
    """What was requested of a job, as far as it decides what may be requested next."""

    claims: Mapping[Subject, _Claim] = field(default_factory=dict)
    """The newest of each subject."""
    turns: Mapping[tuple[str, Subject], tuple[int, ...]] = field(default_factory=dict)
    """By controller and subject: the epochs in which the controller reversed it."""
    failures: Mapping[tuple[str, Subject], _Failures] = field(default_factory=dict)
    """By controller and subject. Without executors: a request for them leaves nothing behind, and depends on others."""

    def objection(self, controller: str, touches: frozenset[str], proposal: Proposal, seen: Situation) -> str | None:
        """Why a proposal is not requested now; None if it is."""
        epoch = seen.observation.epoch
        if seen.in_progress is not None:
            return f"waits for {seen.in_progress}"
        for subject, direction in subjects_of(proposal.operation, seen).items():
            kind, name = subject
            if kind not in touches:
                return f"controller {controller!r} touches {', '.join(sorted(touches))}, and this is about {kind}"
            failed = self.failures.get((controller, subject))
            if failed is not None and epoch - failed.epoch < failed.rest:
                often = "has failed" if failed.count == 1 else f"has failed {failed.count} times in a row"
                return (
                    f"a change of {_described(kind, name)} {often}; it can be tried again in "
                    f"{failed.rest - (epoch - failed.epoch)} epochs"
                )
            claim = self.claims.get(subject)
            if claim is None:
                continue
            passed = epoch - claim.epoch
            if claim.controller != controller and passed < HOLD:
                opposes = " and this goes against it" if direction * claim.direction < 0 else ""
                return (
                    f"{claim.operation!r} of controller {claim.controller!r} ended {passed} epochs ago{opposes}; "
                    f"{_described(kind, name)} can be changed again in {HOLD - passed} epochs"
                )
            if passed < REST:
                return f"{_described(kind, name)} rests for {REST - passed} more epochs after {claim.operation!r}"
            turns = [each for each in self.turns.get((controller, subject), ()) if epoch - each < TURNS_WITHIN]
            if claim.controller == controller and claim.direction * direction < 0 and len(turns) >= MOST_TURNS:
                return (
                    f"it contradicts itself: it turned {_described(kind, name)} back {len(turns)} times within "
                    f"{TURNS_WITHIN} epochs; it can do so again in {turns[0] + TURNS_WITHIN - epoch} epochs"
                )
        return None

    def after(self, controller: str, proposal: Proposal, seen: Situation) -> Arbiter:
        """A proposal is requested."""
        epoch, operation = seen.observation.epoch, words_of(proposal.operation)
        claims, turns = dict(self.claims), dict(self.turns)
        for subject, direction in subjects_of(proposal.operation, seen).items():
            before = claims.get(subject)
            if before is not None and before.controller == controller and before.direction * direction < 0:
                key = (controller, subject)
                turns[key] = (*(each for each in turns.get(key, ()) if epoch - each < TURNS_WITHIN), epoch)
            claims[subject] = _Claim(controller, operation, direction, epoch)
        return replace(self, claims=claims, turns=turns)

    def ended(self, controller: str, operation: str, epoch: int, *, well: bool = True) -> Arbiter:
        """The operation of a controller has ended: what it has changed rests from now on."""
        own = [
            subject
            for subject, claim in self.claims.items()
            if (claim.controller, claim.operation) == (controller, operation)
        ]
        claims = {**self.claims, **{subject: replace(self.claims[subject], epoch=epoch) for subject in own}}
        if not well:
            return replace(self, claims=claims, failures=self._failures_with(controller, own, epoch))
        kept = {key: found for key, found in self.failures.items() if key[0] != controller or key[1] not in own}
        return replace(self, claims=claims, failures=kept)

    def failed(self, controller: str, proposal: Proposal, seen: Situation) -> Arbiter:
        """The job has refused what was requested. It is as it was, so others may change the subjects."""
        subjects = subjects_of(proposal.operation, seen)
        return replace(self, failures=self._failures_with(controller, subjects, seen.observation.epoch))

    def _failures_with(
        self, controller: str, subjects: Iterable[Subject], epoch: int
    ) -> dict[tuple[str, Subject], _Failures]:
        found = dict(self.failures)
        for subject in subjects:
            if subject[0] != "executors":
                before = found.get((controller, subject))
                found[controller, subject] = _Failures(1 if before is None else before.count + 1, epoch)
        return found

    def forgotten(self, controller: str) -> Arbiter:
        """A controller is gone; another one of its name begins anew. What it has changed still rests."""
        return replace(
            self,
            turns={key: found for key, found in self.turns.items() if key[0] != controller},
            failures={key: found for key, found in self.failures.items() if key[0] != controller},
        )


def fault_of(found: object, seen: Situation) -> str | None:
    """What is wrong with a controller's return value; None if it holds proposals that can be decided on."""
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        return f"decide must return proposals and a memory; instead of proposals there is {type(found).__name__}"
    if len(found) > MOST_AT_ONCE:
        return f"it floods the job: {len(found)} proposals at once; at most {MOST_AT_ONCE} are taken"
    wanted: dict[Subject, Proposal] = {}
    for each in found:
        if not isinstance(each, Proposal):
            return f"a proposal must be a Proposal, found {type(each).__name__} {each!r:.60}"
        if not is_operation(each.operation):
            return f"a proposal needs an operation, found {type(each.operation).__name__} {each.operation!r:.60}"
        for subject in subjects_of(each.operation, seen):
            if subject in wanted:
                one, other = words_of(wanted[subject].operation), words_of(each.operation)
                return f"it contradicts itself: {one!r} and {other!r} at once"
            wanted[subject] = each
    return None


def _described(kind: str, name: str) -> str:
    match kind:
        case "knobs":
            return f"knob {name}"
        case "partitions":
            return f"the number of partitions of {name!r}"
        case "bins":
            return f"the bins of {name!r}"
        case "executors":
            return "the number of executors"
        case "operators":
            return f"operator {name!r}"
        case _:
            return f"the {kind}"
